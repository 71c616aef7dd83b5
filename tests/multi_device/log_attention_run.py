"""Runs in a process of its own with 8 virtual devices: prints errors of sharded log-attention."""

import json
import sys
from functools import partial

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

from heinsen_jax.ops import LogAttentionState, log_attention  # noqa: E402

BATCH, LENGTH, HEADS, DEPTH = 8, 8 * 40, 2, 4


def by_batch(query, key, log_value, log_decay, implementation):
    options = {"log_decay": log_decay, "implementation": implementation}
    return log_attention(query, key, log_value, **options)


def by_tokens(query, key, log_value, log_decay, implementation):
    """Devices exchange states, of a size that does not grow with the sequence, and nothing else."""
    empty = LogAttentionState.empty((BATCH,), HEADS, DEPTH, DEPTH)
    states = jax.lax.all_gather(empty.absorb(key, log_value, log_decay), "devices")
    before = empty
    for device in range(jax.device_count()):
        merged = before.merge(jax.tree.map(lambda x, device=device: x[device], states))
        is_earlier = device < jax.lax.axis_index("devices")
        merged = LogAttentionState(merged.log_s, merged.log_z)
        before = jax.tree.map(partial(jnp.where, is_earlier), merged, before)
    options = {"log_decay": log_decay, "implementation": implementation}
    return log_attention(query, key, log_value, initial_state=before, **options)


def main() -> None:
    rng = np.random.default_rng(0)
    arrays = [
        rng.standard_normal((BATCH, LENGTH, HEADS, DEPTH)).astype(np.float32) for _ in range(3)
    ]
    arrays.append(-rng.exponential(0.1, (BATCH, LENGTH, HEADS, DEPTH)).astype(np.float32))
    cotangent = rng.standard_normal(arrays[0].shape).astype(np.float32)
    mesh = jax.make_mesh((8,), ("devices",), axis_types=(AxisType.Auto,))
    specs = {by_batch: PartitionSpec("devices"), by_tokens: PartitionSpec(None, "devices")}

    def differentiate(function):
        output, pullback = jax.vjp(function, *arrays)
        return output, pullback(cotangent)

    errors = {}
    for implementation in sys.argv[1:]:
        whole = partial(by_batch, implementation=implementation)
        expected = jax.tree.leaves(jax.jit(differentiate, static_argnums=0)(whole))
        for function, spec in specs.items():
            part = partial(function, implementation=implementation)
            sharded = jax.shard_map(part, mesh=mesh, in_specs=spec, out_specs=spec)
            actual = jax.tree.leaves(jax.jit(differentiate, static_argnums=0)(sharded))
            errors[f"{implementation} {function.__name__}"] = [
                float(np.max(np.abs(have - want)) / np.max(np.abs(want)))
                for have, want in zip(actual, expected, strict=True)
            ]
    print(json.dumps({"devices": jax.device_count(), "errors": errors}))


if __name__ == "__main__":
    main()
