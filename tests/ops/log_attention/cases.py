"""Shapes, inputs, gradients and error bounds shared by the tests of log-attention."""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import (
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)

FAST = ("scan", "chunked")
IMPLEMENTATIONS = ("reference", *FAST)
SCAN_NIGHTLY = ("reference", pytest.param("scan", marks=pytest.mark.nightly), "chunked")


@dataclass(frozen=True)
class Case:
    """Combination of shapes; `sources` differs from `length` only if not causal."""

    length: int
    batch: tuple[int, ...] = ()
    num_heads: int = 1
    num_kv_heads: int = 1
    key_depth: int = 3
    value_depth: int = 2
    sources: int | None = None
    has_state: bool = False

    @property
    def is_causal(self) -> bool:
        return self.sources is None


CASES = (
    Case(1, key_depth=1, value_depth=1, has_state=True),
    Case(2, batch=(2,), num_heads=2, value_depth=5),
    Case(15, num_heads=2, num_kv_heads=2, key_depth=4, value_depth=9, has_state=True),
    Case(16, batch=(1, 2), num_heads=2, key_depth=1, value_depth=4),
    Case(17, sources=17, num_heads=2, key_depth=2, value_depth=3, has_state=True),
    Case(63, batch=(2,), key_depth=9),
    Case(64, num_heads=4, num_kv_heads=2, value_depth=1, has_state=True),
    Case(65, batch=(2,), num_heads=2, key_depth=5, value_depth=5),
    Case(5, sources=100, batch=(2,), num_heads=2, key_depth=7, value_depth=4),
    Case(129, num_heads=2, key_depth=4, has_state=True),
    Case(500, key_depth=8, value_depth=3),
    Case(1100, num_heads=2, has_state=True),  # two blocks of the chunked form
)


class Inputs(NamedTuple):
    query: Any
    key: Any
    value: Any  # log-values for log_attention
    state: Any = None  # a LogAttentionState or None


class Result(NamedTuple):
    output: Any
    state: LogAttentionState
    gradients: Inputs


def random_inputs(case: Case, seed: int, std: float = 1.0) -> Inputs:
    """Return normal float32 inputs; the state, if any, is that of three earlier tokens."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return (std * rng.standard_normal((*case.batch, *shape))).astype(np.float32)

    sources = case.sources or case.length
    state = None
    if case.has_state:
        log_z = draw(case.num_kv_heads, case.key_depth)
        log_s = log_z[..., None] + draw(case.num_kv_heads, case.key_depth, case.value_depth)
        state = LogAttentionState(jnp.asarray(log_s), jnp.asarray(log_z))
    return Inputs(
        draw(case.length, case.num_heads, case.key_depth),
        draw(sources, case.num_kv_heads, case.key_depth),
        draw(sources, case.num_kv_heads, case.value_depth),
        state,
    )


def random_cotangents(inputs: Inputs, seed: int = 0) -> tuple[np.ndarray, LogAttentionState]:
    """Cotangents of the output and of the state after it."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    *batch, _, groups, depth = inputs.key.shape
    output = draw(*inputs.query.shape[:-1], inputs.value.shape[-1])
    log_s = draw(*batch, groups, depth, inputs.value.shape[-1])
    return output, LogAttentionState(jnp.asarray(log_s), jnp.asarray(draw(*batch, groups, depth)))


def averages(state: LogAttentionState) -> HeinsenAttentionState:
    """A state of log-values, real or complex, as that of the values."""
    ratio = state.log_s - jnp.where(jnp.isneginf(state.log_z), jnp.inf, state.log_z)[..., None]
    mean = jnp.exp(jnp.real(ratio))
    if jnp.iscomplexobj(ratio):
        mean = jnp.where(jnp.abs(jnp.imag(ratio)) > np.pi / 2, -mean, mean)
    return HeinsenAttentionState(mean, state.log_z, state.log_decay)


def in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tree)


@partial(jax.jit, static_argnames=("implementation", "is_causal"))
def _differentiate(inputs: Inputs, cotangents, implementation: Any, is_causal: bool) -> Result:
    def call(inputs: Inputs):
        return log_attention(
            *inputs[:3],
            initial_state=inputs.state,
            is_causal=is_causal,
            return_state=True,
            implementation=implementation,
        )

    (output, state), pullback = jax.vjp(call, inputs)
    return Result(output, state, pullback(cotangents)[0])


def differentiate(
    inputs: Inputs,
    implementation: Any,
    *,
    is_causal: bool = True,
    cotangents: tuple[Any, LogAttentionState] | None = None,
) -> Result:
    """Output, end state and gradients of `log_attention`, as NumPy arrays."""
    cotangents = random_cotangents(inputs) if cotangents is None else cotangents
    dtype = inputs.query.dtype
    of_output, of_state = cotangents
    of_state = jax.tree.map(lambda x: jnp.asarray(x, jnp.promote_types(dtype, "float32")), of_state)
    cotangents = jnp.asarray(of_output, dtype), of_state
    result = _differentiate(inputs, cotangents, implementation, is_causal)
    return jax.tree.map(np.asarray, result)


def oracle(inputs: Inputs, *, is_causal: bool = True, cotangents=None) -> Result:
    """`differentiate` of the definition, in float64."""
    cotangents = random_cotangents(inputs) if cotangents is None else cotangents
    with jax.enable_x64(True):
        return differentiate(
            in_float64(inputs), "reference", is_causal=is_causal, cotangents=in_float64(cotangents)
        )


@partial(jax.jit, static_argnames=("implementation", "is_causal"))
def _differentiate_mean(inputs: Inputs, cotangent, implementation: Any, is_causal: bool):
    def call(inputs: Inputs):
        return heinsen_attention(
            *inputs[:3],
            initial_state=None if inputs.state is None else averages(inputs.state),
            is_causal=is_causal,
            implementation=implementation,
        )

    output, pullback = jax.vjp(call, inputs)
    return output, pullback(cotangent)[0]


def differentiate_mean(
    inputs: Inputs, implementation: Any, *, is_causal: bool = True
) -> tuple[np.ndarray, Inputs]:
    """Output and gradients of `heinsen_attention`, as NumPy arrays."""
    cotangent = jnp.asarray(random_cotangents(inputs)[0], inputs.query.dtype)
    result = _differentiate_mean(inputs, cotangent, implementation, is_causal)
    return jax.tree.map(np.asarray, result)


def mean_oracle(inputs: Inputs, *, is_causal: bool = True) -> tuple[np.ndarray, Inputs]:
    with jax.enable_x64(True):
        return differentiate_mean(in_float64(inputs), "reference", is_causal=is_causal)


def assert_within(actual: Any, expected: Any, bound: Any, name: str = "") -> None:
    """Assert |actual - expected| <= bound elementwise, with -inf equal to -inf and no NaN."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape, f"{name}: {actual.shape} != {expected.shape}"
    assert not np.isnan(actual).any(), f"{name}: {np.isnan(actual).sum()} of {actual.size} NaN"
    np.testing.assert_array_equal(np.isneginf(actual), np.isneginf(expected), err_msg=name)
    with np.errstate(invalid="ignore"):
        excess = np.where(np.isneginf(expected), 0, np.abs(actual - expected)) / bound
    worst = np.max(excess, initial=0)
    assert worst <= 1, f"{name}: error {worst:.3g} times its bound"


def assert_as_exact(actual: Result, expected: Result, std: float, unit: float = 5e-6) -> None:
    """Assert float32 error bounds: `unit` times the magnitudes that were added and subtracted.

    The relative error of a share exp(term - total) is the absolute error of its exponent: gradients
    are compared in units of the largest one times the size of the exponents.
    """

    def log_bound(x: np.ndarray) -> np.ndarray:
        return unit * (1 + np.abs(np.where(np.isneginf(x), 0, x)) + std)

    assert_within(actual.output, expected.output, log_bound(expected.output), "log Y")
    for name in ("log_s", "log_z"):
        end = getattr(expected.state, name)
        assert_within(getattr(actual.state, name), end, log_bound(end), name)
    assert_gradients_within(actual.gradients, expected.gradients, unit * (1 + std))


def assert_gradients_within(actual: Inputs, expected: Inputs, relative: float) -> None:
    for name in Inputs._fields:
        pair = jax.tree.leaves(getattr(actual, name)), jax.tree.leaves(getattr(expected, name))
        for have, want in zip(*pair, strict=True):
            assert np.isfinite(have).all(), f"gradient of {name} is not finite"
            largest = max(1.0, np.max(np.abs(want), initial=0))
            assert_within(have, want, relative * largest, f"gradient of {name}")
