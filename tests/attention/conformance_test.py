"""What every mechanism must do, by name: each capability it declares, and no other."""

import itertools
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention

MODEL_DIM, NUM_HEADS, BATCH = 24, 4, 2

# Sizes at which something happens within few tokens. Log-attention as it is by default needs long
# to compile: `oracle_test` has more of its variants, tests/ops each keyword.
NAMES = attention.names()
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in NAMES}
VARIANTS |= {
    "log, window": ("log", {"window_size": 5}),
    "log, decay of heads": ("log", {"decay": "head", "implementation": "scan"}),
    "log, decay of features": ("log", {"decay": "feature", "num_kv_heads": 2}),
    "log, decay and window": ("log", {"decay": "feature", "window_size": 9}),
    "log, not gated": ("log", {"gated": False}),
    "log, linear values": (
        "log",
        {"values": "linear", "decay": "feature", "implementation": "scan"},
    ),
    "log, linear values in chunks": ("log", {"values": "linear", "decay": "feature"}),
    "softmax, rotary": ("softmax", {"rotary": True, "query_key_norm": True}),
    "softmax, gated": ("softmax", {"gated": True, "key_depth": 3, "value_depth": 5}),
    "sliding_window": ("sliding_window", {"window_size": 5}),
    "sliding_window, rotary": ("sliding_window", {"window_size": 5, "rotary": True}),
    "sliding_window, itself": ("sliding_window", {"window_size": 1}),
    "dilated": ("dilated", {"window_size": 3, "dilation": 4}),
    "tglobal": ("tglobal", {"radius": 4, "block_size": 3, "capacity": 64}),
    "block_sparse, local": ("block_sparse", {"pattern": "local", "block_size": 6}),
    "block_sparse, strided": ("block_sparse", {"pattern": "strided", "block_size": 6}),
    "block_sparse": ("block_sparse", {"block_size": 6, "num_summaries": 2}),
}


NIGHTLY = {"log, window", "log, decay of features", "log, decay and window", "log, not gated"}
NIGHTLY |= {"log, linear values in chunks", "softmax, gated", "sliding_window, itself"}
NIGHTLY |= {"block_sparse, local", "block_sparse, strided"}
LIGHT = [variant for variant in VARIANTS if not variant.startswith("log, ")]
LENGTH = 63


@cache
def build(variant: str, **options: Any) -> attention.Attention:
    name, config = VARIANTS[variant]
    sizes = {"model_dim": MODEL_DIM, "num_heads": NUM_HEADS}
    return attention.build(name, **sizes, rngs=nnx.Rngs(0), **config, **options)


def able(*capabilities: str, among: Any = VARIANTS) -> Any:
    """Runs a test for all variants that declare them all; one worker has all tests of a variant."""
    params = []
    for variant in among:
        if all(getattr(build(variant).capabilities, capability) for capability in capabilities):
            marks = [pytest.mark.xdist_group(f"layer {variant}")]
            marks += [pytest.mark.nightly] * (variant in NIGHTLY)
            params.append(pytest.param(variant, marks=marks))
    return pytest.mark.parametrize("variant", params)


def draw(length: int, std: float = 1.0, seed: int = 0) -> jax.Array:
    return std * jax.random.normal(jax.random.key(seed), (BATCH, length, MODEL_DIM))


X = draw(LENGTH)
COTANGENT = draw(LENGTH, seed=1)


class Result(NamedTuple):
    y: jax.Array
    gradient: jax.Array
    state: Any


def jitted(layer: attention.Attention, **keywords: Any) -> Callable[..., Any]:
    """The layer, compiled, as a function of x and of the arrays after it."""
    graph, parameters = nnx.split(layer)

    @partial(jax.jit, static_argnames="return_state")
    def call(x: jax.Array, **arrays: Any) -> Any:
        return nnx.merge(graph, parameters)(x, **keywords, **arrays)

    return call


@cache
def differentiate(variant: str) -> Callable[..., Result]:
    """Output, gradient and, where there is one, the state at the end: compiled once a variant."""
    graph, parameters = nnx.split(build(variant))
    streams = build(variant).capabilities.streaming

    @jax.jit
    def both(x: jax.Array, cotangent: jax.Array) -> Result:
        def call(x: jax.Array) -> Any:
            y = nnx.merge(graph, parameters)(x, **({"return_state": True} if streams else {}))
            return y if streams else (y, None)

        y, pullback, state = jax.vjp(call, x, has_aux=True)
        return Result(y, *pullback(cotangent), state)

    return both


@cache
def whole(variant: str) -> Result:
    return differentiate(variant)(X, COTANGENT)


@able("causal", among=LIGHT)
def test_is_causal(variant):
    """Neither a value nor a gradient depends on the future."""
    for last in (0, 9, 40, 61):
        x = X.at[:, last + 1 :].set(draw(LENGTH, seed=2)[:, last + 1 :])
        result = differentiate(variant)(x, COTANGENT.at[:, last + 1 :].set(0))
        np.testing.assert_array_equal(result.gradient[:, last + 1 :], 0)
        assert last < 2 or np.any(result.gradient[:, : last + 1] != 0)  # groups of three, for one
        expected = whole(variant).y[:, : last + 1]
        np.testing.assert_allclose(result.y[:, : last + 1], expected, atol=1e-5)


@able("bidirectional", among=LIGHT)
def test_is_bidirectional(variant):
    call = jitted(build(variant), is_causal=False)
    y, changed = call(X), call(X.at[:, 40:].set(draw(LENGTH, seed=2)[:, 40:]))
    difference = np.max(np.abs(changed[:, :40] - y[:, :40]))
    assert difference > 1e-5 or variant == "sliding_window, itself"
    if build(variant).capabilities.cross:
        cross = jitted(build(variant))
        np.testing.assert_allclose(cross(X, source=X), y, atol=1e-5)
        others = cross(X, source=draw(33, seed=1))
        assert others.shape == X.shape
        assert np.max(np.abs(others - y)) > 1e-4


@able("streaming")
def test_streaming_equals_one_pass(variant):
    """In value, in gradients that pass through the state, and in the state at the end."""
    graph, parameters = nnx.split(build(variant))

    @jax.jit
    def in_pieces(x: jax.Array, cotangent: jax.Array) -> Result:
        def call(x: jax.Array) -> Any:
            layer = nnx.merge(graph, parameters)
            state, parts = layer.init_state((BATCH,)), []
            for start, stop in itertools.pairwise((0, 22, LENGTH)):
                y, state = layer(x[:, start:stop], state=state, return_state=True)
                parts.append(y)
            return jnp.concatenate(parts, 1), state

        y, pullback, state = jax.vjp(call, x, has_aux=True)
        return Result(y, *pullback(cotangent), state)

    have, want = in_pieces(X, COTANGENT), whole(variant)
    np.testing.assert_allclose(have.y, want.y, atol=2e-5)
    np.testing.assert_allclose(have.gradient, want.gradient, atol=5e-5)
    for a, b in zip(jax.tree.leaves(have.state), jax.tree.leaves(want.state), strict=True):
        if jnp.iscomplexobj(b):  # a sum that nearly cancels has a logarithm far off
            a, b = jnp.exp(a).real, jnp.exp(b).real
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


@able("streaming", among=LIGHT)
def test_token_by_token_in_one_compiled_loop(variant):
    graph, parameters = nnx.split(build(variant))

    @jax.jit
    def stream(x: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, parameters)

        def step(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            y, state = layer(token[:, None], state=state, return_state=True)
            return state, y[:, 0]

        state = layer.init_state((BATCH,), capacity=LENGTH + 7)
        return jnp.moveaxis(jax.lax.scan(step, state, jnp.moveaxis(x, 1, 0))[1], 0, 1)

    np.testing.assert_allclose(stream(X), whole(variant).y, atol=2e-5)


@able("streaming")
def test_the_state_is_of_the_size_that_is_claimed(variant):
    layer = build(variant)
    call = partial(layer, return_state=True)
    for length in (0, 7, 63):
        state = layer.init_state((1,), capacity=length)
        _, state = jax.eval_shape(lambda x, state: call(x, state=state), draw(length)[:1], state)
        arrays = [x for x in jax.tree.leaves(state) if x.ndim]
        counts = layer.state_size(length) - sum(x.size * x.dtype.itemsize for x in arrays)
        assert counts in (0, 4)


CONSTANT = {"log", "sliding_window", "dilated"}


@pytest.mark.parametrize("name", sorted(CONSTANT & set(attention.names())))
def test_states_that_are_constant_in_the_length(name):
    assert build(name).state_size(10) == build(name).state_size(10**6)


@able("causal", "segments")
def test_segments_are_independent(variant):
    """Each is as if it came first, with anything after it."""
    borders = [0, 21, 22, 43, LENGTH]
    segment_ids = np.searchsorted(borders, np.arange(LENGTH), side="right")
    segment_ids = np.broadcast_to(10 - segment_ids, X.shape[:2])  # any numbers do
    packed = jitted(build(variant))(X, segment_ids=segment_ids)
    for start, stop in itertools.pairwise(borders):
        alone = differentiate(variant)(jnp.roll(X, -start, 1), COTANGENT).y[:, : stop - start]
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=2e-5)


@able(among=LIGHT)
def test_extreme_inputs_stay_finite(variant):
    for std in (1e-3, 1e3):
        y, gradient, _ = differentiate(variant)(std * X, COTANGENT)
        assert np.all(np.isfinite(y))
        assert np.all(np.isfinite(gradient))


@able(among=LIGHT)
def test_half_precision_is_near(variant):
    """Within 3% of the largest output: some six roundings to 8 bits, one after another."""
    y = jitted(build(variant, dtype=jnp.bfloat16))(X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    expected = whole(variant).y
    error = np.max(np.abs(np.asarray(y, np.float32) - expected))
    assert error < 0.03 * np.max(np.abs(expected))


@able()
def test_what_is_not_declared_is_refused(variant):
    layer = build(variant)
    x = draw(8)
    ids = jnp.zeros((BATCH, 8), int)
    calls = {
        "causal": {"is_causal": True},
        "bidirectional": {"is_causal": False},
        "streaming": {"return_state": True},
        "cross": {"source": x},
        "segments": {"segment_ids": ids},
    }
    for capability, keywords in calls.items():
        if not getattr(layer.capabilities, capability):
            with pytest.raises(NotImplementedError, match=f"is not {capability}; it is: "):
                layer(x, **keywords)
    if not layer.capabilities.streaming:
        with pytest.raises(NotImplementedError, match="does not stream"):
            layer.init_state((BATCH,))


@pytest.mark.parametrize("name", attention.names())
def test_a_misspelt_field_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match="window_sise"):
        attention.build(name, model_dim=8, num_heads=2, rngs=nnx.Rngs(0), window_sise=3)


@pytest.mark.parametrize("name", ["softmax", "tglobal"])
def test_a_state_without_room_is_an_error_or_nan(name):
    layer = build(name)
    state = layer.init_state((BATCH,), capacity=15)  # whole blocks of tglobal
    with pytest.raises(ValueError, match="has room for 15 tokens, and this is token 16"):
        layer(draw(16), state=state)
    call = jitted(build(name))
    y, state = call(draw(9), state=state, return_state=True)
    assert np.all(np.isfinite(y))
    assert np.all(np.isnan(call(draw(8), state=state)))
