"""Sections of an experiment that do not fit each other are refused before a run."""

from dataclasses import replace

import pytest

from heinsen_jax import data
from heinsen_jax.config import ExperimentConfig
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
