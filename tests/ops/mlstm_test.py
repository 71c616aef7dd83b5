"""mLSTM attention against its recurrence, token by token."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from heinsen_jax.ops import MLSTMState, mlstm_attention
from heinsen_jax.ops.mlstm import mlstm_summary

BATCH, LENGTH, HEADS, KEY_DEPTH, VALUE_DEPTH = 2, 101, 2, 5, 3


def draw(strength: float) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    tokens = BATCH, LENGTH, HEADS
    query, key = rng.standard_normal((2, *tokens, KEY_DEPTH))
    return {
        "query": query,
        "key": key,
        "value": rng.standard_normal((*tokens, VALUE_DEPTH)),
        "log_input_gate": strength * rng.standard_normal(tokens),
        "log_forget_gate": -0.1 * strength * rng.exponential(size=tokens),
    }


def recurrence(
    query: Any, key: Any, value: Any, log_input_gate: Any, log_forget_gate: Any
) -> tuple[Any, Any]:
    """C and n relative to exp(m), m_t = max(log f_t + m_(t-1), log i_t): eqs. (19) to (27) of
    Beck et al. (2024). Returns o, and C and n themselves as a pair with m."""

    def step(carry: Any, token: Any) -> tuple[Any, Any]:
        memory, normalizer, m = carry
        q, k, v, log_i, log_f = token
        after = jnp.maximum(log_f + m, log_i)
        forget, write = jnp.exp(log_f + m - after), jnp.exp(log_i - after)
        k = write[..., None] * k / np.sqrt(KEY_DEPTH)
        memory = forget[..., None, None] * memory + jnp.einsum("bnk,bnv->bnkv", k, v)
        normalizer = forget[..., None] * normalizer + k
        total = jnp.abs(jnp.sum(normalizer * q, -1))
        y = jnp.einsum("bnk,bnkv->bnv", q, memory)
        y = y / jnp.maximum(total, jnp.exp(-after))[..., None]
        return (memory, normalizer, after), y

    zeros = jnp.zeros((BATCH, HEADS, KEY_DEPTH, VALUE_DEPTH))
    first = zeros, zeros[..., 0], jnp.full((BATCH, HEADS), -1e300)
    arrays = query, key, value, log_input_gate, log_forget_gate
    after, y = lax.scan(step, first, tuple(jnp.moveaxis(x, 1, 0) for x in arrays))
    return jnp.moveaxis(y, 0, 1), after


@pytest.mark.parametrize("strength", [0.1, 1.0, 30.0])
@pytest.mark.usefixtures("x64")
def test_values_and_gradients_equal_the_recurrence(strength):
    arrays = draw(strength)
    cotangent = np.random.default_rng(1).standard_normal(arrays["value"].shape)

    def differentiate(function: Any) -> Any:
        y, pullback = jax.vjp(lambda arrays: function(**arrays), arrays)
        return y, pullback(cotangent)[0]

    have = jax.jit(partial(differentiate, mlstm_attention))()
    want = jax.jit(partial(differentiate, lambda **arrays: recurrence(**arrays)[0]))()
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_states_equal_the_recurrence_and_merge():
    arrays = draw(3.0)
    _, (memory, normalizer, m) = recurrence(**arrays)

    def check(state: MLSTMState) -> None:
        factor = np.exp(state.m - m)
        np.testing.assert_allclose(state.c * factor[..., None, None], memory, atol=1e-12)
        np.testing.assert_allclose(state.n * factor[..., None], normalizer, atol=1e-12)

    @jax.jit
    def states(arrays: dict[str, Any]) -> list[MLSTMState]:
        parts = [
            mlstm_summary(**{name: x[:, slice(*tokens)] for name, x in arrays.items()})
            for tokens in ((0, 40), (40, 41), (41, LENGTH))
        ]
        empty = MLSTMState.empty((BATCH,), HEADS, KEY_DEPTH, VALUE_DEPTH, jnp.float64)
        return [
            mlstm_attention(**arrays, return_state=True)[1],
            empty.merge(parts[0]).merge(parts[1]).merge(parts[2]),
            empty.merge(parts[0].merge(parts[1].merge(parts[2]))),
        ]

    state, *others = states(arrays)
    check(state)
    for merged in others:
        check(merged)
        np.testing.assert_allclose(merged.m, state.m, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_gradients_flow_through_merged_states():
    arrays = draw(1.0)

    def part(arrays: Any, *tokens: int) -> dict[str, Any]:
        return {name: x[:, slice(*tokens)] for name, x in arrays.items()}

    def merged(arrays: Any) -> Any:
        state = MLSTMState.empty((BATCH,), HEADS, KEY_DEPTH, VALUE_DEPTH, jnp.float64)
        for tokens in ((0, 30), (30, 60)):
            state = state.merge(mlstm_summary(**part(arrays, *tokens)))
        return jnp.sum(jnp.sin(mlstm_attention(**part(arrays, 60, LENGTH), initial_state=state)))

    def whole(arrays: Any) -> Any:
        return jnp.sum(jnp.sin(recurrence(**arrays)[0][:, 60:]))

    have, want = (jax.jit(jax.grad(function))(arrays) for function in (merged, whole))
    for name, x in want.items():
        np.testing.assert_allclose(have[name], x, atol=1e-10, err_msg=name)


@pytest.mark.usefixtures("as_users_compile")
def test_rounding_errors_do_not_accumulate():
    """After a burst of large input gates, thousands of small ones with weak decay."""
    length, level = 20_000, 15.0
    rng = np.random.default_rng(0)
    tokens = 1, length, 1
    query, key, value = (rng.standard_normal((*tokens, 2)).astype(np.float32) for _ in range(3))
    log_input = np.full(tokens, -level, np.float32)
    log_input[:, :10] = level
    log_forget = np.float32(-1e-4 * rng.uniform(size=tokens))
    gates = {"log_input_gate": log_input, "log_forget_gate": log_forget}
    _, state = jax.jit(partial(mlstm_attention, return_state=True))(query, key, value, **gates)
    total = np.cumsum(np.float64(log_forget)[0, ::-1, 0])[::-1]
    after = np.append(total[1:], 0)
    weights = np.exp(np.float64(log_input)[0, :, 0] + after)[:, None]
    normalizer = np.sum(weights * np.float64(key)[0, :, 0] / np.sqrt(2), 0)
    have = np.float64(state.n)[0, 0] * np.exp(np.float64(state.m)[0, 0])
    np.testing.assert_allclose(have, normalizer, rtol=5e-5)


@pytest.mark.usefixtures("unchecked")
def test_a_state_without_its_decay_does_not_merge_into_another():
    state = MLSTMState.empty((), 1, 2, 3)
    with pytest.raises(ValueError, match=r"other\.log_forget is None"):
        state.merge(state)


@pytest.mark.nightly
def test_gates_of_any_size_are_in_range():
    arrays = {name: np.float32(x) for name, x in draw(1e3).items()}
    y, pullback = jax.vjp(lambda arrays: mlstm_attention(**arrays), arrays)
    for x in jax.tree.leaves((y, pullback(y))):
        assert np.all(np.isfinite(x))


@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise():
    arrays = {name: np.float32(x) for name, x in draw(1.0).items()}
    with pytest.raises(ValueError, match="log_input_gate must have shape"):
        mlstm_attention(**arrays | {"log_input_gate": arrays["value"]})
    state = MLSTMState.empty((BATCH,), HEADS, VALUE_DEPTH, KEY_DEPTH)
    with pytest.raises(ValueError, match=r"initial_state.c must have shape"):
        mlstm_attention(**arrays, initial_state=state)
