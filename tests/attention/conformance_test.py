"""Conformance suite of mechanisms: every declared capability, and no other."""

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
from heinsen_jax.attention.matrix_state import MatrixStateAttention
from heinsen_jax.attention.parameters import in_float32

MODEL_DIM, NUM_HEADS, BATCH = 24, 4, 2

# Sizes small enough for few tokens. Default log-attention compiles slowly: `oracle_test` covers
# more of its variants, tests/ops each keyword.
NAMES = attention.names()
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, attention.mechanism(name).short_options(20)) for name in NAMES
}
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
    "softmax, rotary": (
        "softmax",
        {"positions": "rotary", "query_key_norm": True, "scale": 0.4, "output_gate": "head"},
    ),
    "softmax, gated": ("softmax", {"gated": True, "key_depth": 3, "value_depth": 5}),
    "sliding_window, rotary": (
        "sliding_window",
        {
            "window_size": 5,
            "positions": "rotary",
            "query_key_norm": "joint",
            "zero_centered_norm": True,
            "scale": 0.4,
            "output_gate": "feature",
        },
    ),
    "sliding_window, itself": ("sliding_window", {"window_size": 1}),
    "sliding_window, sinks": (
        "sliding_window",
        {"window_size": 5, "num_sinks": 3, "positions": "rotary", "num_kv_heads": 1},
    ),
    "softmax, alibi": ("softmax", {"positions": "alibi"}),
    "hgrn2, lower bound": ("hgrn2", {"lower_bound": 0.3}),
    "log, hedgehog": ("log", {"features": "hedgehog", "decay": "feature", "values": "linear"}),
    "log, product": (
        "log",
        {"features": "product", "key_depth": 6, "decay": "coupled", "values": "linear"},
    ),
    "tglobal": ("tglobal", {"radius": 4, "block_size": 3, "capacity": 64}),
    "block_sparse, local": ("block_sparse", {"pattern": "local", "block_size": 6}),
    "block_sparse, strided": ("block_sparse", {"pattern": "strided", "block_size": 6}),
    "block_sparse": ("block_sparse", {"block_size": 6, "num_summaries": 2}),
    "rmt": ("rmt", {"segment_length": 16, "num_memories": 2}),
    "mamba2": ("mamba2", {"key_depth": 8}),
    "gated_deltaproduct, groups": ("gated_deltaproduct", {"num_key_heads": 2, "num_steps": 3}),
    "kda, lower bound": ("kda", {"decay_lower_bound": -5.0, "output_gate": "head"}),
    "mamba2, groups": ("mamba2", {"key_depth": 8, "num_key_heads": 2}),
    "gqa+mamba2": ("gqa+mamba2", {"gqa.positions": "rotary", "mamba2.key_depth": 8}),
    "log+kda": ("log+kda", {"log.values": "linear", "log.decay": "head"}),
    "gated_deltanet, groups": ("gated_deltanet", {"num_key_heads": 1, "num_value_heads": 4}),
    "log_window, rotary": ("log_window", {"window_size": 7, "positions": "rotary"}),
    "log_window, decay": ("log_window", {"window_size": 7, "decay": "head"}),
}


# In the short suite: one variant per kind of state for streaming, and per kind of sum for half
# precision; tests/ops covers every op.
STREAMS = {
    "log",
    "gqa+mamba2",
    "softmax, rotary",
    "sliding_window, rotary",
    "sliding_window, sinks",
    "mla",
    "tglobal",
    "rmt",
    "retnet",
}
HALF = {"log", "softmax", "linear", "colt5", "additive", "kda"}
# One of each base class and kind of state; `oracle_test` has all mechanisms.
REPRESENTATIVES = {"log", "softmax", "sliding_window", "kda", "tglobal", "additive"}
LIGHT = [variant for variant in VARIANTS if not variant.startswith("log, ")]
LENGTH, CHUNK = 60, 20  # not a multiple of blocks, segments and windows


@cache
def shapes_of(variant: str, **options: Any) -> attention.Attention:
    """Return the layer, with shapes in place of parameters."""
    name, config = VARIANTS[variant]
    sizes = {"model_dim": MODEL_DIM, "num_heads": NUM_HEADS}
    return nnx.eval_shape(
        lambda: attention.build(name, **sizes, rngs=nnx.Rngs(0), **config, **options)
    )


@cache
def build(variant: str, **options: Any) -> attention.Attention:
    """Return the layer with weights from NumPy, since initialization compiles many functions."""
    graph, shapes = nnx.split(shapes_of(variant, **options))
    rng = np.random.default_rng(0)

    def initial(path: tuple, x: jax.ShapeDtypeStruct) -> jax.Array:
        center = 1.0 if "scale" in jax.tree_util.keystr(path) else 0.0
        return jnp.asarray(center + 0.2 * rng.standard_normal(x.shape), x.dtype)

    return nnx.merge(graph, jax.tree.map_with_path(initial, shapes))


def able(*capabilities: str, among: Any = VARIANTS, short: Any = REPRESENTATIVES) -> Any:
    """Run a test for all variants with these capabilities.

    Variants that are not in `short` run nightly.
    """
    params = []
    for variant in among:
        can = shapes_of(variant).capabilities
        if all(getattr(can, capability) for capability in capabilities):
            marks = [pytest.mark.nightly] * (variant not in short)
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
    """Compile the layer as a function of x and further arrays."""
    graph, parameters = nnx.split(layer)

    @partial(jax.jit, static_argnames="return_state")
    def call(x: jax.Array, **arrays: Any) -> Any:
        return nnx.merge(graph, parameters)(x, **keywords, **arrays)

    return call


@cache
def compiled(variant: str) -> Callable[..., Result]:
    """Return output and gradient, with segments if supported; compiled once per variant."""
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
    """Values and gradients do not depend on later tokens."""
    for last in (0, 9, 40, 58):
        x, cotangent = X.copy(), COTANGENT.copy()
        x[:, last + 1 :] = draw(LENGTH, seed=2)[:, last + 1 :]
        cotangent[:, last + 1 :] = 0
        result = differentiate(variant, x, cotangent)
        np.testing.assert_array_equal(result.gradient[:, last + 1 :], 0)
        assert last < 2 or np.any(
            result.gradient[:, : last + 1] != 0
        )  # for example groups of three
        expected = whole(variant).y[:, : last + 1]
        np.testing.assert_allclose(result.y[:, : last + 1], expected, atol=1e-5)


@able("bidirectional", among=LIGHT)
def test_is_bidirectional(variant):
    """Early tokens depend on later ones; and tokens may attend to another sequence of any
    length."""
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
    """Return output and state of a sequence that a compiled loop processes in chunks."""

    def step(state: Any, chunk: jax.Array) -> tuple[Any, jax.Array]:
        y, state = layer(chunk, state=state, return_state=True)
        return state, y

    chunks = jnp.moveaxis(x.reshape(BATCH, LENGTH // size, size, MODEL_DIM), 1, 0)
    state, y = jax.lax.scan(step, layer.init_state((BATCH,), capacity=LENGTH), chunks)
    return jnp.moveaxis(y, 0, 1).reshape(x.shape), state


def assert_same_state(have: Any, want: Any) -> None:
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        if jnp.iscomplexobj(b):  # logarithms of nearly canceling sums are inaccurate
            a, b = jnp.exp(a).real, jnp.exp(b).real
        np.testing.assert_allclose(a, b, atol=2e-5, rtol=1e-4)


@cache
def in_chunks(variant: str) -> tuple[Result, Any]:
    """Return output, gradient and final state of a sequence that is processed in chunks."""
    graph, parameters = nnx.split(build(variant))

    @jax.jit
    def both(x: jax.Array, cotangent: jax.Array) -> tuple[Result, Any]:
        def call(x: jax.Array) -> Any:
            return scan(nnx.merge(graph, parameters), x, CHUNK)

        y, pullback, state = jax.vjp(call, x, has_aux=True)
        return Result(y, *pullback(cotangent)), state

    return jax.tree.map(np.asarray, both(X, COTANGENT))


@cache
def by_token(variant: str) -> tuple[np.ndarray, Any]:
    graph, parameters = nnx.split(build(variant))
    return jax.jit(lambda x: scan(nnx.merge(graph, parameters), x, 1))(X)


@able("streaming", short=STREAMS)
def test_streaming_equals_one_pass(variant):
    """Compare values, gradients through the state, and the final state."""
    (y, gradient), state = in_chunks(variant)
    np.testing.assert_allclose(y, whole(variant).y, atol=2e-5)
    expected = whole(variant).gradient
    np.testing.assert_allclose(gradient, expected, atol=5e-5 + 2e-5 * np.max(np.abs(expected)))
    assert_same_state(state, by_token(variant)[1])


@able("streaming", among=LIGHT, short=REPRESENTATIVES | STREAMS)
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
def test_a_loop_carries_a_float32_state_through_float64_tokens(variant):
    layer = build(variant)

    def step(state: Any, x: jax.Array) -> Any:
        y, state = layer(x[:, None], state=state, return_state=True)
        return state, y

    state, tokens = layer.init_state((BATCH,), capacity=3), np.zeros((3, BATCH, MODEL_DIM))
    after, _ = jax.eval_shape(partial(jax.lax.scan, step), state, tokens)
    dtypes = [jax.tree.map(lambda x: x.dtype, x) for x in (state, after)]
    assert dtypes[0] == dtypes[1]


@able("streaming", short=REPRESENTATIVES | STREAMS)
def test_state_size_is_that_of_the_state(variant):
    layer = build(variant)

    def after(x: jax.Array) -> Any:
        state = layer.init_state((1,), capacity=x.shape[1])
        return layer(x, state=state, return_state=True)[1]

    for length in (0, 61):
        state = jax.eval_shape(after, jax.ShapeDtypeStruct((1, length, MODEL_DIM), jnp.float32))
        arrays = [x for x in jax.tree.leaves(state) if x.ndim]
        counts = layer.state_size(length) - sum(x.size * x.dtype.itemsize for x in arrays)
        assert counts in (0, 4)


CONSTANT = [name for name in NAMES if attention.mechanism(name).capabilities.mergeable]


@pytest.mark.parametrize("name", [*CONSTANT, "sliding_window", "dilated", "rmt"])
def test_states_of_constant_size(name):
    assert build(name).state_size(10) == build(name).state_size(10**6)


@able("causal", "segments")
def test_segments_are_independent(variant):
    """Each segment equals one that comes first, with any tokens after it."""
    borders = [0, 21, 22, 43, LENGTH]
    segment_ids = np.searchsorted(borders, np.arange(LENGTH), side="right")
    segment_ids = np.broadcast_to(10 - segment_ids, X.shape[:2]).astype(
        np.int32
    )  # ids may be any integers
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
def test_half_precision_is_close(variant):
    """Within 3% of the largest output: about six successive roundings to 8 bits. Where small
    outputs are normalized in the end, in root mean square."""
    y = jitted(build(variant, dtype=jnp.bfloat16))(X.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    expected = whole(variant).y
    norm = np.linalg.norm if isinstance(build(variant), MatrixStateAttention) else max_abs
    assert norm(np.asarray(y, np.float32) - expected) < 0.03 * norm(expected)


@able()
@pytest.mark.usefixtures("x64")
def test_strict_promotion(variant):
    """Dtypes are converted explicitly, also in gradients, with states and beside 64-bit types."""
    can = shapes_of(variant).capabilities
    x = jnp.asarray(X[:, :CHUNK], jnp.bfloat16)
    options = {"segment_ids": ONE_SEGMENT[:, :CHUNK]} if can.segments and can.causal else {}

    def gradients(layer: attention.Attention) -> Any:
        return nnx.grad(lambda layer: jnp.sum(in_float32(layer(x, **options))))(layer)

    def stream(layer: attention.Attention) -> Any:
        return layer(x, state=layer.init_state((BATCH,), capacity=CHUNK), return_state=True)

    with jax.numpy_dtype_promotion("strict"):
        nnx.eval_shape(gradients, shapes_of(variant, dtype=jnp.bfloat16))
        if can.streaming:
            nnx.eval_shape(stream, shapes_of(variant, dtype=jnp.bfloat16))


@pytest.mark.parametrize("name", NAMES)
def test_outputs_have_the_dtype_of_the_layer(name):
    layer = shapes_of(name, dtype=jnp.bfloat16)
    is_causal = layer.capabilities.causal
    with jax.numpy_dtype_promotion("strict"):
        y = nnx.eval_shape(lambda layer: layer(X[:, :CHUNK], is_causal=is_causal), layer)
    assert y.dtype == jnp.bfloat16


def max_abs(x: np.ndarray) -> float:
    return np.max(np.abs(x))


@able()
def test_undeclared_capabilities_raise(variant):
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
            with pytest.raises(NotImplementedError, match=f"no capability '{capability}'; it has "):
                layer(x, **keywords)
    if not layer.capabilities.streaming:
        with pytest.raises(NotImplementedError, match="does not stream"):
            layer.init_state((BATCH,))
    with pytest.raises(ValueError, match=f"must have width model_dim={x.shape[-1]}"):
        layer(x[..., 1:])


@pytest.mark.parametrize("name", attention.names())
def test_a_misspelled_field_is_named(name):
    with pytest.raises(ValueError, match="window_sise"):
        attention.build(name, model_dim=8, num_heads=2, rngs=nnx.Rngs(0), window_sise=3)


@pytest.mark.parametrize("name", ["softmax", "tglobal"])
def test_exceeding_the_capacity_raises_or_is_nan(name):
    layer = build(name)
    state = layer.init_state((BATCH,), capacity=15)  # complete blocks of tglobal
    with pytest.raises(ValueError, match="its capacity of 15 tokens is less than 16"):
        layer(jnp.asarray(draw(16)), state=state)
    call = jitted(build(name))
    y, state = call(draw(9), state=state, return_state=True)
    assert np.all(np.isfinite(y))
    assert np.all(np.isnan(call(draw(8), state=state)))
