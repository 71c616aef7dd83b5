"""A small hybrid of log-attention and softmax attention, 3:1, on articles in Parquet files.

python -m heinsen_jax.data.train_tokenizer data/wikitext-2 --vocab-size 4096 --output data/bpe
python train.py --config configs/wikitext2_hybrid.py

where data/wikitext-2 has files train-*.parquet and validation-*.parquet with an article of
WikiText-2 in each row, in the column `text`; needs the extra `parquet`. A recent recipe: byte-level
BPE trained on the corpus, RMS norms and SwiGLU, separate documents, Muon with a schedule of
warm-up, constant rate and decay. 1.3M parameters, 400 updates of 8 x 256 tokens, some minutes on
2 CPU cores.
benchmarks/results/wikitext2_hybrid.json has the losses of a run on the validation articles, tested
on the test articles, and wikitext2_hybrid_adamw.json has the losses of AdamW with a one-cycle
schedule.
"""

from heinsen_jax.config import (
    DataConfig,
    ExperimentConfig,
    LanguageModelConfig,
    Layers,
    OptimizerConfig,
    TrainingConfig,
)


def get_config() -> ExperimentConfig:
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=4096,
            model_dim=128,
            num_layers=4,
            num_heads=4,
            attention=(
                Layers("log", repeats=3, options={"values": "linear", "decay": "head"}),
                Layers("softmax", options={"positions": "rotary"}),
            ),
            block="llama",
            convolution_size=4,
            qk_norm=True,
            remat=True,
        ),
        data=DataConfig(
            corpus="data/wikitext-2",
            tokenizer="data/bpe",
            documents="separate",
            sequence_length=256,
            batch_size=8,
        ),
        optimizer=OptimizerConfig(
            name="muon",
            schedule="wsd",
            learning_rate=3e-3,
            end_learning_rate=1e-5,
            warmup_steps=50,
        ),
        training=TrainingConfig(
            steps=400, log_every=20, evaluate_every=200, sample_prompt="The ", z_loss=1e-4
        ),
    )
