"""Log-attention inside `jax.shard_map`, on eight virtual devices."""

from tests.multi_device.apart import run_apart


def test_sharded_by_batch_and_by_tokens():
    """Output and gradients equal those on one device; by tokens, only states are exchanged."""
    errors = run_apart("log_attention_run.py", "chunked")["errors"]
    assert len(errors) == 2
    for name, of_arrays in errors.items():
        assert len(of_arrays) == 5, name
        assert max(of_arrays) < 1e-5, (name, of_arrays)
