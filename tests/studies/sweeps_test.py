"""Sweeps of studies."""

import pytest

from heinsen_jax import attention
from heinsen_jax.models import LanguageModelConfig
from studies import sweeps


@pytest.mark.parametrize("length", [16, 64, 512])
def test_every_sweep_limits_windows_and_blocks(length):
    """If it has a window, segments or blocks."""
    chosen = sweeps.causal_mechanisms(length)
    found = {}
    for label, fields in chosen.items():
        fields = {field.removeprefix("model."): value for field, value in fields.items()}
        config = LanguageModelConfig(num_heads=2, model_dim=32, num_layers=1, **fields)
        found[label] = config.layer_pattern[0], config.mechanisms()[0]
        for size in ("window_size", "radius", "segment_length", "block_size"):
            limit = getattr(found[label][1], size, None)
            assert limit is None or 1 <= limit < length, label
    names = {name for name, _ in found.values()}
    causal = {x for x in attention.names() if attention.mechanism(x).capabilities.causal}
    assert names == causal - sweeps.NOT_RUN
    assert causal > sweeps.NOT_RUN
    assert sweeps.NAMES.keys() <= names
    assert len({*map(repr, found.values())}) == len(chosen)


def test_a_short_length_is_refused():
    with pytest.raises(ValueError, match="length=15 must be at least 16"):
        sweeps.causal_mechanisms(15)


def test_learning_rates_decay_to_a_tenth():
    fields = sweeps.learning_rates(3e-3)["0.003"]
    assert fields["optimizer.learning_rate"] == 3e-3
    assert fields["optimizer.end_learning_rate"] == pytest.approx(3e-4)
