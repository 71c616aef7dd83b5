"""Decays of any size, -inf included, among ordinary ones: values and gradients equal those of the
recurrence in float64."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from heinsen_jax.ops import (
    dot_product_attention,
    gated_delta_rule,
    heinsen_attention,
    log_attention,
    log_window_attention,
    mlstm_attention,
)
from heinsen_jax.ops.numerics import running_sums
from heinsen_jax.typing import Array

T, N, K, V, WINDOW = 140, 2, 4, 3, 9  # more than a chunk or a tile
HUGE = -1e3, -1e4, -1e6, -1e9, -1e30, -np.inf


def draw(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


QKV = draw(T, N, K, seed=0), draw(T, N, K, seed=1) / 2, draw(T, N, V, seed=2)
RATES = np.random.default_rng(3).uniform(0, 0.5, (T, N)).astype(np.float32)


def decays(huge: tuple[float, ...], *shape: int) -> np.ndarray:
    """Ordinary decays, and in one of ten places a huge one."""
    rng = np.random.default_rng(4)
    ordinary = -rng.exponential(0.1, shape)
    mixed = np.where(rng.random(shape) < 0.1, rng.choice(huge, shape), ordinary)
    return mixed.astype(np.float32)


def softmax_oracle(query: Array, key: Array, value: Array, decay: Array) -> Array:
    token = jnp.arange(T)

    def row(total: Array, x: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        query, decay, t = x
        total = jnp.where((token < t)[:, None], total + decay[None], 0.0)  # [S, N]
        scores = jnp.einsum("nk,snk->sn", query, key) / K**0.5 + total
        weights = jax.nn.softmax(jnp.where((token <= t)[:, None], scores, -jnp.inf), 0)
        return total, jnp.einsum("sn,snv->nv", weights, value)

    return lax.scan(row, jnp.zeros((T, N)), (query, decay, token))[1]


def delta_oracle(query: Array, key: Array, value: Array, decay: Array, beta: Array) -> Array:
    decay = decay if decay.ndim == 3 else decay[..., None]

    def step(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, decay, beta = x
        state = jnp.exp(decay)[..., None] * state
        change = value - jnp.einsum("nk,nkv->nv", key, state)
        state = state + (beta[:, None] * key)[..., None] * change[:, None]
        return state, jnp.einsum("nkv,nk->nv", state, query) / K**0.5

    return lax.scan(step, jnp.zeros((N, K, V)), (query, key, value, decay, beta))[1]


def mlstm_oracle(query: Array, key: Array, value: Array, forget: Array, inputs: Array) -> Array:
    def step(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, forget, inputs = x
        value = jnp.concatenate([value, jnp.ones((N, 1))], -1)
        new = (jnp.exp(inputs)[:, None] * key / K**0.5)[..., None] * value[:, None]
        state = jnp.exp(forget)[:, None, None] * state + new
        y = jnp.einsum("nkv,nk->nv", state, query)
        return state, y[:, :-1] / jnp.maximum(jnp.abs(y[:, -1:]), 1)

    return lax.scan(step, jnp.zeros((N, K, V + 1)), (query, key, value, forget, inputs))[1]


def heinsen_oracle(query: Array, key: Array, value: Array, decay: Array) -> Array:
    decay = decay if decay.ndim == 3 else decay[..., None]

    def step(state: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        query, key, value, decay = x
        value = jnp.concatenate([value, jnp.ones((N, 1))], -1)
        state = jnp.exp(decay)[..., None] * state + jnp.exp(key)[..., None] * value[:, None]
        y = jnp.einsum("nkv,nk->nv", state, jnp.exp(query))
        return state, y[:, :-1] / y[:, -1:]

    return lax.scan(step, jnp.zeros((N, K, V + 1)), (query, key, value, decay))[1]


def log_oracle(query: Array, key: Array, log_value: Array, decay: Array) -> Array:
    return jnp.log(heinsen_oracle(query, key, jnp.exp(log_value), decay))


def log_window_oracle(query: Array, key: Array, value: Array, decay: Array, *more: Array) -> Array:
    query_features, key_features, log_weight = more
    token = jnp.arange(T)
    leaving = jnp.roll(decay, WINDOW, 0).at[:WINDOW].set(0)  # the decay of token t - WINDOW

    def row(total: Array, x: tuple[Array, ...]) -> tuple[Array, Array]:
        query, features, log_weight, decay, t = x
        total = total + jnp.where((token < t - WINDOW)[:, None], decay[None], 0.0)
        near = jnp.einsum("nk,snk->sn", query, key) / K**0.5
        far = jax.nn.logsumexp(features[None] + key_features, -1) + log_weight[None] + total
        scores = jnp.where((t - token < WINDOW)[:, None], near, far)
        weights = jax.nn.softmax(jnp.where((token <= t)[:, None], scores, -jnp.inf), 0)
        return total, jnp.einsum("sn,snv->nv", weights, value)

    rows = query, query_features, log_weight, leaving, token
    return lax.scan(row, jnp.zeros((T, N)), rows)[1]


class Case(NamedTuple):
    """An op of query, key, value, decay and further arrays, with its oracle."""

    op: Callable[..., Array]
    oracle: Callable[..., Array]
    by_feature: bool = False
    more: tuple[np.ndarray, ...] = ()


def forgetting(implementation: str) -> Callable[..., Array]:
    return lambda query, key, value, decay: dot_product_attention(
        query, key, value, log_decay=decay, is_causal=True, implementation=implementation
    )


def delta(query: Array, key: Array, value: Array, decay: Array, beta: Array) -> Array:
    return gated_delta_rule(query, key, value, log_decay=decay, erase=beta, write=beta)


def mlstm(query: Array, key: Array, value: Array, forget: Array, inputs: Array) -> Array:
    gates = {"log_forget_gate": forget, "log_input_gate": inputs}
    return mlstm_attention(query, key, value, **gates)


def decayed(op: Callable[..., Array], implementation: str) -> Callable[..., Array]:
    return lambda query, key, value, decay: op(
        query, key, value, log_decay=decay, implementation=implementation
    )


def log_window(query: Array, key: Array, value: Array, decay: Array, *more: Array) -> Array:
    options = {"log_weight": more[2], "log_decay": decay, "local_window_size": WINDOW}
    return log_window_attention(query, key, value, *more[:2], **options)


FEATURES = draw(T, N, 5, seed=5), draw(T, N, 5, seed=6), draw(T, N, seed=7)
CASES = {
    "softmax, xla": Case(forgetting("xla"), softmax_oracle),
    "softmax, tiled": Case(forgetting("tiled"), softmax_oracle),
    "delta rule, by head": Case(delta, delta_oracle, more=(RATES,)),
    "delta rule, by feature": Case(delta, delta_oracle, True, more=(RATES,)),
    "mlstm": Case(mlstm, mlstm_oracle, more=FEATURES[2:]),
    "log_window": Case(log_window, log_window_oracle, more=FEATURES),
}
for name in ("scan", "chunked", "reference"):
    CASES |= {
        f"heinsen, {name}, by head": Case(decayed(heinsen_attention, name), heinsen_oracle),
        f"heinsen, {name}, by feature": Case(
            decayed(heinsen_attention, name), heinsen_oracle, True
        ),
        f"log, {name}, by head": Case(decayed(log_attention, name), log_oracle),
        f"log, {name}, by feature": Case(decayed(log_attention, name), log_oracle, True),
    }
SHORT = {"softmax, xla", "softmax, tiled", "delta rule, by feature", "mlstm"}
SHORT |= {"log, chunked, by head"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=[] if x in SHORT else pytest.mark.nightly) for x in CASES],
)
def test_huge_decays_are_exact(name):
    op, oracle, by_feature, more = CASES[name]
    cotangent = draw(T, N, V, seed=8)

    def all_of(function: Callable[..., Array], *arrays: Array) -> tuple[Array, ...]:
        y, pull = jax.vjp(function, *arrays)
        return y, *pull(jnp.asarray(cotangent, y.dtype))

    compiled, exact = (jax.jit(lambda *x, f=f: all_of(f, *x)) for f in (op, oracle))
    for huge in (HUGE, *((x,) for x in HUGE)):
        decay = decays(huge, T, N, *(K,) * by_feature)
        arrays = *QKV, decay, *more
        have = compiled(*map(jnp.asarray, arrays))
        with jax.enable_x64(True):
            want = exact(*(jnp.asarray(x, jnp.float64) for x in arrays))
        for x, y in zip(have, want, strict=True):
            scale = np.max(np.abs(y))
            np.testing.assert_allclose(x, y, atol=3e-6 * scale, err_msg=f"{huge}")


@pytest.mark.parametrize("implementation", ["xla", "tiled"])
def test_decays_with_huge_sums_are_exact(implementation):
    """Sums of 1e8 nats, of which each term counts."""
    decay = np.full((4096, 1), -3e4, np.float32)
    decay[-8:] = -0.1
    x = jnp.zeros((4096, 1, 1))
    value = jnp.asarray(draw(4096, 1, 1, seed=0))
    y = jax.jit(forgetting(implementation))(x, x, value, jnp.asarray(decay))
    weights = np.exp(-0.1 * np.arange(8.0, -1, -1))  # the token with decay -3e4 itself, and later
    want = weights @ np.asarray(value)[-9:, 0, 0] / weights.sum()
    np.testing.assert_allclose(y[-1, 0, 0], want, rtol=1e-5)


def test_sums_of_too_many_decays_are_refused():
    decays = jax.ShapeDtypeStruct(((1 << 21) + 1,), jnp.float32)
    with pytest.raises(NotImplementedError, match=r"2,097,153 tokens: .* at most 2,097,152"):
        jax.eval_shape(partial(running_sums, axis=0, quantum=1.0), decays)
