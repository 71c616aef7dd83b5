"""Sections of an experiment that do not fit each other are refused before a run."""

from dataclasses import replace

import pytest

from heinsen_jax import data
from heinsen_jax.config import ExperimentConfig
from heinsen_jax.config.load import check_range
from heinsen_jax.errors import UserError
from heinsen_jax.training.settings import resolve_settings


@pytest.mark.parametrize(
    ("section", "fitting", "wrong", "message"),
    [
        ("model", {"vocab_size": 257}, {"vocab_size": 256}, "make it at least 257"),
        (
            "model",
            {"vocab_size": 258, "is_causal": False},
            {"vocab_size": 257, "is_causal": False},
            "make it at least 258",
        ),
        (
            "model",
            {"max_length": 32, "positions": "learned"},
            {"max_length": 31, "positions": "learned"},
            "shorter than sequences of 32 tokens",
        ),
        (
            "training",
            {"accumulation_steps": 4},
            {"accumulation_steps": 3},
            r"data\.batch_size=8 must be a multiple of training\.accumulation_steps=3",
        ),
    ],
)
def test_sections_fit_each_other(small: ExperimentConfig, section, fitting, wrong, message):
    plain = replace(small, training=replace(small.training, sample_tokens=0))
    dataset = data.load(plain.data)

    def changed(fields: dict) -> ExperimentConfig:
        return replace(plain, **{section: replace(getattr(plain, section), **fields)})

    resolve_settings(changed(fitting), dataset)
    with pytest.raises(UserError, match=message):
        resolve_settings(changed(wrong), dataset)


def test_samples_fit_into_the_positions_of_the_model(small: ExperimentConfig):
    model = replace(small.model, max_length=32, positions="learned")
    training = replace(small.training, sample_prompt="abc", sample_tokens=30)
    fitting = replace(small, model=model, training=training)
    dataset = data.load(small.data)
    resolve_settings(fitting, dataset)
    wrong = replace(fitting, training=replace(training, sample_tokens=31))
    with pytest.raises(UserError, match=r"sample_tokens=31 after 3 .* set it to at most 30"):
        resolve_settings(wrong, dataset)


@pytest.mark.parametrize("seed", [2**32, 2**63 - 1])
def test_seeds_that_jax_would_truncate_are_refused(small: ExperimentConfig, seed):
    check_range(replace(small, seed=2**32 - 1))
    with pytest.raises(UserError, match=f"seed={seed} is out of range"):
        check_range(replace(small, seed=seed))
