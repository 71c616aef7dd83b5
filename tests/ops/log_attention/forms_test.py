"""Options of the fast tier: sizes, rematerialization, parallel scans, half precision."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops.log_attention import (
    Chunked,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)
from heinsen_jax.ops.log_attention.inputs import Inputs
from tests.ops.log_attention.cases import assert_within, averages
from tests.ops.log_attention.chunked_test import DEFAULT, inputs, value_and_gradients

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    "options",
    [
        Chunked(16, 128),
        Chunked(32, 64, remat=False),
        Chunked(16, 16, exponent_budget=-1),
        Chunked(parallel_scan=True),
        Chunked(16, 64, parallel_scan=True),
        Chunked(32, 128, remat=False, parallel_scan=True),
    ],
    ids=str,
)
def test_sizes_and_rematerialization_have_no_effect(options):
    arrays = inputs()
    log_y, gradients = value_and_gradients(*arrays, options)
    expected, expected_gradients = value_and_gradients(*arrays, DEFAULT)
    np.testing.assert_allclose(log_y, expected, atol=5e-6)
    for have, want in zip(gradients, expected_gradients, strict=True):
        assert_within(have, want, 5e-6 * np.max(np.abs(want)))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (log_attention, "log_decay"),
        (log_attention, "segment_ids"),
        (log_attention, "both"),
        (heinsen_attention, "both"),
    ],
)
@given(length=st.integers(1, 70), std=st.sampled_from([0.1, 1.0, 5.0]), seed=st.integers(0, 1000))
@settings(max_examples=12, deadline=None)
def test_a_parallel_scan_gives_the_states_of_a_sequential_one(function, name, length, std, seed):
    """Padded to one length, so that examples share compiled functions."""
    keys = jax.random.split(jax.random.key(seed), 6)
    query, key, value = std * jax.random.normal(keys[0], (3, 1, 70, 2, 3))
    options: Any = {"key_value_seq_lengths": jnp.full((1,), length)}
    if name != "segment_ids":
        options["log_decay"] = -std * jax.random.exponential(keys[1], (1, 70, 2, 3))
    if name != "log_decay":
        options["segment_ids"] = jnp.cumsum(jax.random.bernoulli(keys[2], 0.1, (1, 70)), 1)
    log_z = jax.random.normal(keys[3], (1, 2, 3))
    state = LogAttentionState(log_z[..., None] + jax.random.normal(keys[4], (1, 2, 3, 3)), log_z)
    state = state if function is log_attention else averages(state)
    have, want = (
        with_pullback(function, implementation, query, key, value, state, options)
        for implementation in (Chunked(16, 80, parallel_scan=True), Chunked(16, 80))
    )
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        a, b = (np.where(np.isfinite(x), x, 0) for x in (a, b))
        assert_within(a, b, 3e-5 * (1 + np.max(np.abs(b))))


@partial(jax.jit, static_argnums=(0, 1))
def with_pullback(function, implementation, query, key, value, state, options):
    """Return output, state, and the gradient of a function of both."""

    def loss(query, key, value, state, options):
        y, after = function(
            query,
            key,
            value,
            initial_state=state,
            return_state=True,
            implementation=implementation,
            **options,
        )
        finite = jnp.where(y == -jnp.inf, 0, jnp.sin(y))
        return jnp.sum(finite) + jnp.sum(jnp.tanh(after.log_z)), (y, after)

    arguments = query, key, value, state
    decay = {name: x for name, x in options.items() if name == "log_decay"}

    def of_floats(*arguments):
        *others, decay = arguments
        return loss(*others, {**options, **decay})

    argnums = tuple(range(5))
    return jax.value_and_grad(of_floats, argnums, has_aux=True)(*arguments, decay)


@pytest.mark.parametrize("keywords", [(), ("log_decay", "segment_ids")])
def test_an_accelerator_gets_few_large_operations(keywords, monkeypatch):
    """Only the exact tier loops over chunks."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    arrays = [jax.ShapeDtypeStruct((1, 65_536, 24, 32), jnp.float32)] * 3
    places: Any = {
        "log_decay": ((1, 65_536, 24), jnp.float32),
        "segment_ids": ((1, 65_536), jnp.int32),
    }
    options = {name: jax.ShapeDtypeStruct(*places[name]) for name in keywords}
    wide = jnp.zeros((1, 1, 1, 128))
    plan = DEFAULT.plan(Inputs(wide[:, :, :, None], wide, wide), is_log=True)
    assert plan.form.chunk_size == 128

    def operations(implementation):
        def loss(*arrays, **options):
            return jnp.sum(log_attention(*arrays, implementation=implementation, **options))

        program = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arrays, **options).jaxpr
        return operations_of_first_tier(program.jaxpr)

    assert "scan" not in operations(DEFAULT)
    assert "scan" in operations(Chunked(parallel_scan=False))


def operations_of_first_tier(program: Any) -> set[str]:
    """Return the names of all primitives, for conditionals only of the first branch."""
    found = set()
    for equation in program.eqns:
        found.add(equation.primitive.name)
        inner = dict(equation.params)
        if "branches" in inner:
            inner["branches"] = inner["branches"][0]
        programs = (getattr(x, "jaxpr", x) for x in inner.values())
        found = found.union(*(operations_of_first_tier(x) for x in programs if hasattr(x, "eqns")))
    return found


@pytest.mark.parametrize("function", [log_attention, heinsen_attention])
@pytest.mark.parametrize("parallel_scan", [False, True])
def test_half_precision_rounds_factors_alone(function, parallel_scan):
    """Within 0.4%, the precision of bfloat16, and more in gradients, which are differences; states
    are float32."""
    arrays = [jnp.asarray(x, jnp.bfloat16) for x in inputs()]
    implementation = Chunked(32, parallel_scan=parallel_scan)

    @partial(jax.jit, static_argnums=1)
    def outputs(arrays, implementation):
        def loss(*arrays):
            y, state = function(*arrays, implementation=implementation, return_state=True)
            return jnp.sum(jnp.sin(y.astype(jnp.promote_types(y.dtype, jnp.float32)))), (y, state)

        return jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)

    (_, (y, state)), gradients = outputs(arrays, implementation)
    assert state.log_z.dtype == jnp.float32
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in arrays]
        (_, (want, want_state)), want_gradients = jax.device_get(outputs(wide, "reference"))
    pairs = zip((y, *gradients), (want, *want_gradients), strict=True)
    for have, expected in pairs:
        error = np.linalg.norm(np.asarray(have, np.float64) - expected)
        assert 1e-5 < error / np.linalg.norm(expected) < 3e-2
    for have, expected in zip(jax.tree.leaves(state), jax.tree.leaves(want_state), strict=True):
        np.testing.assert_allclose(np.exp(np.asarray(have)), np.exp(expected), rtol=0.02, atol=0.02)
