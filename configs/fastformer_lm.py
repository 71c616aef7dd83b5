"""Fastformer made causal, as its authors' own language model, on WikiText-2.

python train.py --config configs/fastformer_lm.py

Six layers of width 128 whose windows double from 4 to 64 tokens, the last of which sees all 2048:
with a vocabulary of 32,100 these are the published model's 5,589,092 parameters. As published:
blocks, ends, sizes, windows, batches of 2 x 2048 tokens, some 20 epochs, a rate of at most 5e-4.
Not as published: GPT-2's tokens, no dropout, other first weights, and the rate falls by a cosine.
Text and tokenizer are downloaded. Not yet trained to its end.
"""

from heinsen_jax.config import (
    DataConfig,
    ExperimentConfig,
    LanguageModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

NUM_LAYERS = 6


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=50304,
            model_dim=128,
            num_layers=NUM_LAYERS,
            num_heads=4,
            attention=("additive",) * NUM_LAYERS,
            attention_options=tuple(
                (f"{layer}.window_size", 4 * 2**layer) for layer in range(NUM_LAYERS - 1)
            ),
            block="fastformer",
            embedding_style="fastformer",
            max_length=2048,
        ),
        data=DataConfig(corpus="wikitext-2", tokenizer="gpt2", sequence_length=2048, batch_size=2),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, end_learning_rate=0.0, warmup_steps=100, clip_norm=1.0
        ),
        training=TrainingConfig(steps=12_000, log_every=50, evaluate_every=1000),
    )
