"""Log-attention inside `jax.shard_map`, on eight virtual devices."""

import random

from tests.multi_device.apart import run_apart


def test_by_rows_and_by_tokens_it_is_that_of_one_device():
    """Outputs, states and gradients; with segments, decay and states, and both ways."""
    seed = random.randrange(1 << 30)
    errors = run_apart("log_attention_run.py", str(seed))["errors"]
    assert len(errors) == 4
    for name, of_arrays in errors.items():
        assert len(of_arrays) >= 4, name
        assert max(of_arrays) < 1e-5, (name, of_arrays, seed)
