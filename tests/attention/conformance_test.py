"""What every mechanism must do, by name: each capability it declares, and no other."""

import itertools
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention

pytestmark = pytest.mark.slow

MODEL_DIM, NUM_HEADS, BATCH = 24, 4, 2

# Sizes at which something happens within few tokens; and that all variants of a mechanism are run.
NAMES = attention.names()
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in NAMES}
VARIANTS |= {
    "log, window": ("log", {"window_size": 5}),
    "log, decay of heads": ("log", {"decay": "head"}),
    "log, decay of features": ("log", {"decay": "feature", "num_kv_heads": 2}),
    "log, decay and window": ("log", {"decay": "feature", "window_size": 9}),
    "log, not gated": ("log", {"gated": False}),
    "log, linear values": ("log", {"values": "linear", "decay": "feature"}),
    "softmax, rotary": ("softmax", {"rotary": True, "query_key_norm": True}),
    "softmax, gated": ("softmax", {"gated": True, "key_depth": 3, "value_depth": 5}),
    "sliding_window, short": ("sliding_window", {"window_size": 5}),
    "sliding_window, rotary": ("sliding_window", {"window_size": 5, "rotary": True}),
    "sliding_window, itself": ("sliding_window", {"window_size": 1}),
    "dilated, short": ("dilated", {"window_size": 3, "dilation": 4}),
    "tglobal, short": ("tglobal", {"radius": 4, "block_size": 3, "capacity": 64}),
    "block_sparse, local": ("block_sparse", {"pattern": "local", "block_size": 6}),
    "block_sparse, strided": ("block_sparse", {"pattern": "strided", "block_size": 6}),
    "block_sparse, fixed": ("block_sparse", {"block_size": 6, "num_summaries": 2}),
}


# Log-attention takes long to compile. `oracle_test` has all variants, tests/ops each keyword.
LIGHT = [variant for variant in VARIANTS if not variant.startswith("log, ")]
SOME = [*LIGHT, "log, decay of heads", "log, decay and window", "log, linear values"]


@cache
def build(variant: str, **options: Any) -> attention.Attention:
    name, config = VARIANTS[variant]
    sizes = {"model_dim": MODEL_DIM, "num_heads": NUM_HEADS}
    return attention.build(name, **sizes, rngs=nnx.Rngs(0), **config, **options)


def able(*capabilities: str, among: Any = VARIANTS) -> Any:
    """Runs a test for all variants that declare them all."""
    found = [
        variant
        for variant in among
        if all(getattr(build(variant).capabilities, capability) for capability in capabilities)
    ]
    return pytest.mark.parametrize("variant", found)


def draw(length: int, std: float = 1.0, seed: int = 0) -> jax.Array:
    return std * jax.random.normal(jax.random.key(seed), (BATCH, length, MODEL_DIM))


def jitted(variant: str, **keywords: Any) -> Any:
    """The layer, compiled, as a function of x and of what arrays come after it."""
    graph, parameters = nnx.split(build(variant))

    @partial(jax.jit, static_argnames="return_state")
    def call(x: jax.Array, **arrays: Any) -> Any:
        return nnx.merge(graph, parameters)(x, **keywords, **arrays)

    return call


@able(among=LIGHT)
@pytest.mark.parametrize("length", [1, 63, 100, 131])
def test_shapes_at_odd_lengths(variant, length):
    y = jitted(variant)(draw(length))
    assert y.shape == (BATCH, length, MODEL_DIM)
    assert np.all(np.isfinite(y))


@able(among=LIGHT)
def test_jit_equals_eager(variant):
    x = draw(20)
    np.testing.assert_allclose(jitted(variant)(x), build(variant)(x), atol=1e-5)


@able("causal", among=LIGHT)
def test_the_past_has_no_gradient_to_the_future(variant):
    x = draw(131)
    call = jitted(variant)
    pullback = jax.jit(lambda x, cotangent: jax.vjp(call, x)[1](cotangent)[0])
    for last in (0, 9, 62, 129):
        cotangent = jnp.ones_like(x).at[:, last + 1 :].set(0)
        gradient = pullback(x, cotangent)
        np.testing.assert_array_equal(gradient[:, last + 1 :], 0)
        assert last < 2 or np.any(gradient[:, : last + 1] != 0)  # groups of three, for one


@able("causal", among=LIGHT)
def test_what_comes_later_changes_nothing(variant):
    x = draw(131)
    call = jitted(variant)
    other = x.at[:, 70:].set(draw(61, seed=1))
    np.testing.assert_allclose(call(x)[:, :70], call(other)[:, :70], atol=1e-5)


@able("bidirectional")
def test_the_future_matters_where_both_sides_are_seen(variant):
    x = draw(20)
    call = jitted(variant, is_causal=False)
    changed = call(x.at[:, 10:].set(draw(10, seed=1)))
    difference = np.max(np.abs(changed[:, :10] - call(x)[:, :10]))
    assert difference > 1e-5 or variant == "sliding_window, itself"


@able("streaming", among=SOME)
def test_any_pieces_give_the_result_of_one_pass(variant):
    x = draw(43)
    call = jitted(variant)
    expected, end = call(x, return_state=True)
    np.testing.assert_allclose(expected, call(x), atol=1e-5)
    for borders in ([0, 21, 42, 43], [0, 1, 1, 22, 43]):  # few lengths: each is compiled
        state, parts = build(variant).init_state((BATCH,)), []
        for start, stop in itertools.pairwise(borders):
            y, state = call(x[:, start:stop], state=state, return_state=True)
            parts.append(y)
        np.testing.assert_allclose(jnp.concatenate(parts, 1), expected, atol=2e-5)
        for have, want in zip(jax.tree.leaves(state), jax.tree.leaves(end), strict=True):
            if jnp.iscomplexobj(want):  # a sum that nearly cancels has a logarithm far off
                have, want = jnp.exp(have).real, jnp.exp(want).real
            np.testing.assert_allclose(have, want, atol=2e-5, rtol=1e-4)


@able("streaming", among=SOME)
@pytest.mark.parametrize("pad", [0, 7])
def test_token_by_token_in_one_compiled_loop(variant, pad):
    x = draw(63)
    graph, parameters = nnx.split(build(variant))

    @jax.jit
    def stream(x: jax.Array) -> jax.Array:
        layer = nnx.merge(graph, parameters)

        def step(state: Any, token: jax.Array) -> tuple[Any, jax.Array]:
            y, state = layer(token[:, None], state=state, return_state=True)
            return state, y[:, 0]

        state = layer.init_state((BATCH,), capacity=63 + pad)
        return jnp.moveaxis(jax.lax.scan(step, state, jnp.moveaxis(x, 1, 0))[1], 0, 1)

    np.testing.assert_allclose(stream(x), jitted(variant)(x), atol=2e-5)


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


@able("streaming", among=LIGHT)
def test_gradients_pass_through_the_state(variant):
    """A loss of the second piece alone, with respect to the first."""
    x = draw(30)
    call = jitted(variant)

    def in_pieces(x: jax.Array) -> jax.Array:
        _, state = call(x[:, :11], return_state=True)
        return jnp.sum(jnp.sin(call(x[:, 11:], state=state)))

    expected = jax.jit(jax.grad(lambda x: jnp.sum(jnp.sin(call(x)[:, 11:]))))(x)
    np.testing.assert_allclose(jax.jit(jax.grad(in_pieces))(x), expected, atol=5e-5)


@able("segments", among=SOME)
def test_packed_documents_equal_separate_ones(variant):
    x = draw(64)
    borders = [0, 21, 22, 43, 64]  # few lengths: each is compiled
    segment_ids = np.searchsorted(borders, np.arange(64), side="right")
    segment_ids = np.broadcast_to(10 - segment_ids, (BATCH, 64))  # any numbers do
    packed = jitted(variant)(x, segment_ids=segment_ids)
    for start, stop in itertools.pairwise(borders):
        alone = jitted(variant)(x[:, start:stop])
        np.testing.assert_allclose(packed[:, start:stop], alone, atol=2e-5)


@able("cross", among=LIGHT)
def test_cross_attention_with_itself_is_bidirectional(variant):
    x = draw(20)
    crossed = jitted(variant)(x, source=x)
    np.testing.assert_allclose(crossed, jitted(variant, is_causal=False)(x), atol=1e-5)
    others = jitted(variant)(x, source=draw(33, seed=1))
    assert others.shape == x.shape
    assert np.max(np.abs(others - crossed)) > 1e-4


@able(among=LIGHT)
@pytest.mark.parametrize("std", [1e-3, 1e3])
def test_extreme_inputs_stay_finite(variant, std):
    x = draw(40, std)
    call = jitted(variant)
    y, pullback = jax.vjp(call, x)
    assert np.all(np.isfinite(y))
    assert np.all(np.isfinite(pullback(jnp.ones_like(y))[0]))


@able(among=LIGHT)
def test_half_precision_is_near(variant):
    """Within 3% of the largest output: some six roundings to 8 bits, one after another."""
    x = draw(40)
    expected = build(variant)(x)
    layer = build(variant, dtype=jnp.bfloat16)
    y = layer(x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
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
    state = layer.init_state((BATCH,), capacity=16)
    with pytest.raises(ValueError, match="has room for 16 tokens, and this is token 17"):
        layer(draw(17), state=state)
    call = jitted(name)
    y, state = call(draw(9), state=state, return_state=True)
    assert np.all(np.isfinite(y))
    assert np.all(np.isnan(call(draw(8), state=state)))
