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
    "rmt": ("rmt", {"segment_length": 16, "num_memories": 2}),
}


# In the short suite: one variant of each kind of state in pieces, and of each kind of sum in half
# precision; tests/ops has these of each op.
STREAMS = {"log", "softmax, rotary", "sliding_window, rotary", "mla", "longformer", "tglobal"}
STREAMS |= {"memory_compressed", "rmt"}
HALF = {"log", "softmax", "linear", "colt5", "additive"}
LIGHT = [variant for variant in VARIANTS if not variant.startswith("log, ")]
LENGTH, PIECE = 60, 20  # blocks, segments and windows end at neither


@cache
def shapes_of(variant: str, **options: Any) -> attention.Attention:
    """The layer, with shapes in place of parameters."""
    name, config = VARIANTS[variant]
    sizes = {"model_dim": MODEL_DIM, "num_heads": NUM_HEADS}
    return nnx.eval_shape(
        lambda: attention.build(name, **sizes, rngs=nnx.Rngs(0), **config, **options)
    )


@cache
def build(variant: str, **options: Any) -> attention.Attention:
    """The layer, with weights by NumPy, for their initialization compiles many functions."""
    graph, shapes = nnx.split(shapes_of(variant, **options))
    rng = np.random.default_rng(0)

    def initial(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        center = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(center + 0.2 * rng.standard_normal(x.shape), x.dtype)

    return nnx.merge(graph, jax.tree.map_with_path(initial, shapes))


def able(*capabilities: str, among: Any = VARIANTS, short: Any = NAMES) -> Any:
    """Runs a test for all variants that declare them all; one worker has all tests of a variant.

    Those that are not in `short` run nightly.
    """
    params = []
    for variant in among:
        can = shapes_of(variant).capabilities
        if all(getattr(can, capability) for capability in capabilities):
            marks = [pytest.mark.xdist_group(f"layer {variant}")]
            marks += [pytest.mark.nightly] * (variant not in short)
            params.append(pytest.param(variant, marks=marks))
    return pytest.mark.parametrize("variant", params)


def draw(length: int, seed: int = 0) -> np.ndarray:
    shape = BATCH, length, MODEL_DIM
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


X = draw(LENGTH)
ONE_SEGMENT = np.zeros((BATCH, LENGTH), np.int32)
COTANGENT = draw(LENGTH, seed=1)


class Result(NamedTuple):
    y: np.ndarray
    gradient: np.ndarray


def jitted(layer: attention.Attention, **keywords: Any) -> Callable[..., Any]:
    """The layer, compiled, as a function of x and of the arrays after it."""
    graph, parameters = nnx.split(layer)

    @partial(jax.jit, static_argnames="return_state")
    def call(x: jax.Array, **arrays: Any) -> Any:
        return nnx.merge(graph, parameters)(x, **keywords, **arrays)

    return call


@cache
def compiled(variant: str) -> Callable[..., Result]:
    """Output and gradient, with segments where a layer has them: compiled once a variant."""
    graph, parameters = nnx.split(build(variant))
    can = build(variant).capabilities

    @jax.jit
    def both(x: jax.Array, cotangent: jax.Array, segment_ids: jax.Array) -> Result:
        options = {"segment_ids": segment_ids} if can.segments and can.causal else {}
        y, pullback = jax.vjp(lambda x: nnx.merge(graph, parameters)(x, **options), x)
        return Result(y, *pullback(cotangent))

    return both


def differentiate(
    variant: str, x: Any, cotangent: Any = COTANGENT, segment_ids: Any = ONE_SEGMENT
) -> Result:
    return jax.tree.map(np.asarray, compiled(variant)(x, cotangent, segment_ids))


@cache
def whole(variant: str) -> Result:
    return differentiate(variant, X)


@able("causal", among=LIGHT)
def test_is_causal(variant):
    """Neither a value nor a gradient depends on the future."""
    for last in (0, 9, 40, 58):
        x, cotangent = X.copy(), COTANGENT.copy()
        x[:, last + 1 :] = draw(LENGTH, seed=2)[:, last + 1 :]
        cotangent[:, last + 1 :] = 0
        result = differentiate(variant, x, cotangent)
        np.testing.assert_array_equal(result.gradient[:, last + 1 :], 0)
        assert last < 2 or np.any(result.gradient[:, : last + 1] != 0)  # groups of three, for one
        expected = whole(variant).y[:, : last + 1]
        np.testing.assert_allclose(result.y[:, : last + 1], expected, atol=1e-5)


@able("bidirectional", among=LIGHT)
def test_is_bidirectional(variant):
    """Early tokens depend on late ones; and tokens may attend to those of any other sequence."""
    call, few = jitted(build(variant), is_causal=False), X[:, :33]
    changed = few.copy()
    changed[:, 20:] = draw(LENGTH, seed=2)[:, 20:33]
    y = call(few)
    difference = np.max(np.abs(call(changed)[:, :20] - y[:, :20]))
    assert difference > 1e-5 or variant == "sliding_window, itself"
    if build(variant).capabilities.cross:
        cross = jitted(build(variant))
        same, others = cross(X, source=few), cross(X, source=draw(33, seed=1))
        assert same.shape == X.shape
        np.testing.assert_allclose(same[:, :33], y, atol=1e-5)
        assert np.max(np.abs(others - same)) > 1e-4


def scan(layer: attention.Attention, x: jax.Array, size: int) -> tuple[jax.Array, Any]:
    """Output and state of a sequence that a compiled loop feeds in pieces of a size."""

    def step(state: Any, piece: jax.Array) -> tuple[Any, jax.Array]:
        y, state = layer(piece, state=state, return_state=True)
        return state, y

    pieces = jnp.moveaxis(x.reshape(BATCH, LENGTH // size, size, MODEL_DIM), 1, 0)
    state, y = jax.lax.scan(step, layer.init_state((BATCH,), capacity=LENGTH), pieces)
    return jnp.moveaxis(y, 0, 1).reshape(x.shape), state


def assert_same_state(have: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        if jnp.iscomplexobj(b):  # a sum that nearly cancels has a logarithm far off
            a, b = jnp.exp(a).real, jnp.exp(b).real
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


@cache
def in_pieces(variant: str) -> tuple[Result, Any]:
    """And the state at the end."""
    graph, parameters = nnx.split(build(variant))

    @jax.jit
    def both(x: jax.Array, cotangent: jax.Array) -> tuple[Result, Any]:
        def call(x: jax.Array) -> Any:
            return scan(nnx.merge(graph, parameters), x, PIECE)

        y, pullback, state = jax.vjp(call, x, has_aux=True)
        return Result(y, *pullback(cotangent)), state

    return jax.tree.map(np.asarray, both(X, COTANGENT))


@cache
def by_token(variant: str) -> tuple[np.ndarray, Any]:
    graph, parameters = nnx.split(build(variant))
    return jax.jit(lambda x: scan(nnx.merge(graph, parameters), x, 1))(X)


@able("streaming", short=STREAMS)
def test_streaming_equals_one_pass(variant):
    """In value, in gradients that pass through the state, and in the state at the end."""
    (y, gradient), state = in_pieces(variant)
    np.testing.assert_allclose(y, whole(variant).y, atol=2e-5)
    np.testing.assert_allclose(gradient, whole(variant).gradient, atol=5e-5)
    assert_same_state(state, by_token(variant)[1])


@able("streaming", among=LIGHT, short={*NAMES, *STREAMS})
def test_token_by_token_in_one_compiled_loop(variant):
    np.testing.assert_allclose(by_token(variant)[0], whole(variant).y, atol=2e-5)


@pytest.mark.parametrize("variant", ["mla", "softmax, rotary", "sliding_window"])
def test_a_state_without_a_capacity_grows(variant):
    call, state, start = jitted(build(variant), return_state=True), None, 0
    for size in (22, LENGTH - 22):
        tokens = np.s_[:, start : start + size]
        y, state = call(X[tokens], state=state)
        np.testing.assert_allclose(y, whole(variant).y[tokens], atol=2e-5)
        start += size


@able("streaming")
@pytest.mark.usefixtures("x64")
def test_a_loop_carries_the_state_of_float32_through_tokens_of_float64(variant):
    layer = build(variant)

    def step(state: Any, x: jax.Array) -> Any:
        y, state = layer(x[:, None], state=state, return_state=True)
        return state, y

    state, tokens = layer.init_state((BATCH,), capacity=3), np.zeros((3, BATCH, MODEL_DIM))
    after, _ = jax.eval_shape(partial(jax.lax.scan, step), state, tokens)
    dtypes = [jax.tree.map(lambda x: x.dtype, x) for x in (state, after)]
    assert dtypes[0] == dtypes[1]


@able("streaming", short={*NAMES, *STREAMS, "log, decay of heads"})
def test_the_state_is_of_the_size_that_is_claimed(variant):
    layer = build(variant)

    def after(x: jax.Array) -> Any:
        state = layer.init_state((1,), capacity=x.shape[1])
        return layer(x, state=state, return_state=True)[1]

    for length in (0, 61):
        state = jax.eval_shape(after, jax.ShapeDtypeStruct((1, length, MODEL_DIM), jnp.float32))
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
    segment_ids = np.broadcast_to(10 - segment_ids, X.shape[:2]).astype(np.int32)  # any numbers do
    packed = differentiate(variant, X, segment_ids=segment_ids)
    for start, stop in itertools.pairwise(borders):
        alone = differentiate(variant, np.roll(X, -start, 1))
        np.testing.assert_allclose(packed.y[:, start:stop], alone.y[:, : stop - start], atol=2e-5)


@able(among=LIGHT)
def test_extreme_inputs_stay_finite(variant):
    for std in (1e-3, 1e3):
        y, gradient = differentiate(variant, np.float32(std) * X)
        assert np.all(np.isfinite(y))
        assert np.all(np.isfinite(gradient))


@able(among=LIGHT, short=HALF)
def test_half_precision_is_near(variant):
    """Within 3% of the largest output: some six roundings to 8 bits, one after another."""
    y = jitted(build(variant, dtype=jnp.bfloat16))(X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    expected = whole(variant).y
    error = np.max(np.abs(np.asarray(y, np.float32) - expected))
    assert error < 0.03 * np.max(np.abs(expected))


@able(short=VARIANTS)
def test_what_is_not_declared_is_refused(variant):
    layer, x = build(variant), jnp.asarray(draw(8))
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
    with pytest.raises(ValueError, match="its capacity of 15 tokens is less than 16"):
        layer(jnp.asarray(draw(16)), state=state)
    call = jitted(build(name))
    y, state = call(draw(9), state=state, return_state=True)
    assert np.all(np.isfinite(y))
    assert np.all(np.isnan(call(draw(8), state=state)))
