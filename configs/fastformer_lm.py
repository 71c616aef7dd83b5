"""Causal Fastformer language model of its authors, on WikiText-2.

python train.py --config configs/fastformer_lm.py

Six layers of width 128, with windows that double from 4 to 64 tokens and no window in the last
layer. With a vocabulary of 32,100 it has the published number of parameters, 5,589,092. As
published: blocks, embedding style, sizes, windows, batches of 2 x 2048 tokens in which documents
are not separated, about 20 epochs, a maximum learning rate of 5e-4. Different: GPT-2 tokens, no
dropout, other initial weights, cosine decay of the learning rate. Text and tokenizer are
downloaded. Never trained to the end.
"""

from heinsen_jax.config import (
    DataConfig,
    ExperimentConfig,
    LanguageModelConfig,
    Layers,
    OptimizerConfig,
    TrainingConfig,
)

WINDOWS = 4, 8, 16, 32, 64


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=50304,
            model_dim=128,
            num_layers=len(WINDOWS) + 1,
            num_heads=4,
            attention=(
                *(Layers("additive", options={"window_size": size}) for size in WINDOWS),
                "additive",
            ),
            block="fastformer",
            embedding_style="fastformer",
            max_length=2048,
        ),
        data=DataConfig(
            corpus="wikitext-2",
            tokenizer="gpt2",
            sequence_length=2048,
            batch_size=2,
            documents="continuous",
        ),
        optimizer=OptimizerConfig(
            learning_rate=5e-4, end_learning_rate=0.0, warmup_steps=100, clip_norm=1.0
        ),
        training=TrainingConfig(steps=12_000, log_every=50, evaluate_every=1000),
    )
