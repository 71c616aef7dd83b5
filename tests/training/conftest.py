"""A small text, and a run that trains in a second."""

import random
from pathlib import Path

import pytest

from heinsen_jax.config import (
    DataConfig,
    ExperimentConfig,
    LanguageModelConfig,
    OptimizerConfig,
    TrainingConfig,
)

WORDS = [
    "attention",
    "is",
    "constant",
    "in",
    "cost",
    "and",
    "exact",
    "in",
    "value",
    "where",
    "others",
    "overflow",
]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Write words in random order: their letters are predictable, their order is not."""
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    draw = random.Random(0)
    path.write_text(" ".join(draw.choice(WORDS) for _ in range(6000)))
    return path


@pytest.fixture(scope="session")
def small(corpus, tmp_path_factory) -> ExperimentConfig:
    return ExperimentConfig(
        model=LanguageModelConfig(
            vocab_size=264,
            model_dim=32,
            num_layers=1,
            num_heads=2,
            attention="linear",  # compiles faster
        ),
        data=DataConfig(
            corpus=str(corpus),
            cache=str(tmp_path_factory.mktemp("data")),
            sequence_length=32,
            batch_size=8,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-2, end_learning_rate=1e-3, warmup_steps=5),
        training=TrainingConfig(
            steps=60, log_every=5, evaluate_every=30, evaluation_batches=4, sample_tokens=10
        ),
    )
