from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops.colt5 import (
    Routing,
    conditional_attention,
    conditional_feed_forward,
    route,
    soft_top_k,
)

SCALED = {"num_iterations": 20, "epsilon": 0.03, "epsilon_init": 4.0}
SETTINGS = ({}, {"num_iterations": 1}, {"epsilon": 0.1}, SCALED, {**SCALED, "num_iterations": 3})
FEW = settings(max_examples=10)
few_settings = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=[pytest.mark.nightly] * (i not in (0, 4)))
        for i, options in enumerate(SETTINGS)
    ],
)

weigh = jax.jit(
    soft_top_k, static_argnames=("num_iterations", "epsilon", "epsilon_init", "epsilon_decay")
)


def weights_by_definition(scores, k, num_iterations, epsilon, first, decay):
    """One row of scores, in float64."""
    s = np.asarray(scores, np.float64)
    b, epsilon_now = -s, max(epsilon, first)
    for _ in range(num_iterations):
        a = epsilon_now * (np.log(k) - np.logaddexp.reduce((s + b) / epsilon_now))
        b = -np.maximum(s + a, 0)
        epsilon_now = max(epsilon, epsilon_now * decay)
    return np.exp((s + a + b) / epsilon_now)


def expected_weights(scores, k, num_iterations=50, epsilon=1.0, epsilon_init=0.0, decay=0.7):
    rows = np.reshape(scores, (-1, scores.shape[-1]))
    rows = [weights_by_definition(s, k, num_iterations, epsilon, epsilon_init, decay) for s in rows]
    return np.reshape(rows, scores.shape)


def normal(seed: int, *shape: int, std: float = 1.0) -> np.ndarray:
    return std * np.random.default_rng(seed).standard_normal(shape)


# soft_top_k


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", SETTINGS)
@pytest.mark.parametrize("shape", [pytest.param((1,), marks=pytest.mark.nightly), (2, 1, 63)])
def test_weights_are_those_of_the_definition(shape, options):
    for std in (1.0, 30.0):
        scores = normal(0, *shape, std=std)
        actual = weigh(jnp.asarray(scores), 2.5, **options)
        np.testing.assert_allclose(actual, expected_weights(scores, 2.5, **options), atol=1e-12)


@few_settings
def test_weights_in_float32(options):
    scores = normal(1, 2, 100).astype(np.float32)
    actual = weigh(jnp.asarray(scores), 7, **options)
    assert actual.dtype == jnp.float32
    tolerance = 1e-5 / options.get("epsilon", 1.0)
    np.testing.assert_allclose(actual, expected_weights(scores, 7, **options), atol=tolerance)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("options", [{}, {"epsilon": 0.3, "num_iterations": 7}, SCALED])
def test_gradients_agree_with_finite_differences(options):
    scores, cotangent = normal(2, 2, 9)
    actual = jax.grad(lambda s: jnp.sum(cotangent * weigh(s, 3, **options)))(scores)

    def total(s):
        return np.sum(cotangent * expected_weights(s, 3, **options))

    h = 1e-6
    expected = [(total(scores + step) - total(scores - step)) / (2 * h) for step in h * np.eye(9)]
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "k", "options"),
    [
        ("plain50_eps1", 3, {}),
        ("paper50_eps0.03", 3.375, {"epsilon": 0.03}),
        ("scaled20", 3.375, SCALED),
        ("masked", 3, SCALED),
    ],
)
def test_weights_of_the_published_code(golden, name, k, options):
    case = golden("colt5_router")
    mask = jnp.asarray(case["mask"]) if name == "masked" else None
    weights, pullback = jax.vjp(lambda s: weigh(s, k, mask=mask, **options), jnp.asarray(case["s"]))
    np.testing.assert_allclose(weights, case[f"{name}/scores"], rtol=0, atol=1e-10)
    if f"{name}/ds" in case:
        cotangent = jnp.arange(24.0).reshape(2, 12)
        np.testing.assert_allclose(pullback(cotangent)[0], case[f"{name}/ds"], rtol=0, atol=1e-10)


@FEW
@given(st.integers(0, 2**32 - 1), st.floats(1, 10))
def test_weights_sum_to_k_and_increase_with_scores(seed, k):
    scores = normal(seed, 40).astype(np.float32)
    weights = np.asarray(weigh(scores, k, num_iterations=200))
    assert weights.min() >= 0
    assert weights.max() <= 1
    assert np.all(np.diff(weights[np.argsort(scores)]) >= 0)
    np.testing.assert_allclose(weights.sum(), k, rtol=1e-3)


@pytest.mark.usefixtures("x64")
@few_settings
def test_padding_has_no_effect_and_no_weight(options):
    scores = normal(3, 2, 8)
    mask = np.arange(8)[None] < np.array([[5], [0]])
    scores[0, 5:] = np.nan

    def total(s):
        weights = weigh(s, 2, mask=jnp.asarray(mask), **options)
        return jnp.sum(weights * jnp.arange(8.0)[None]), weights

    gradient, weights = jax.grad(total, has_aux=True)(jnp.asarray(scores))
    expected = expected_weights(scores[0, :5], 2, **options)
    np.testing.assert_allclose(weights[0, :5], expected, atol=1e-12)
    np.testing.assert_array_equal(weights[~mask], 0)
    np.testing.assert_array_equal(gradient[~mask], 0)
    assert np.isfinite(gradient[0]).all()


@partial(jax.jit, static_argnames=("num_iterations", "epsilon", "epsilon_init"))
def differentiate_sum(scores, **options):
    weights, pullback = jax.vjp(lambda s: soft_top_k(s, 5, **options), scores)
    return weights, pullback(jnp.arange(scores.size, dtype=jnp.float32))[0]


@pytest.mark.parametrize("options", [{}, SCALED])
@pytest.mark.parametrize(
    "scores",
    [
        normal(4, 50, std=1000.0),
        normal(4, 50, std=1e37),
        np.zeros(50),
        np.full(50, 3e38),
        np.full(50, -3e38),
        np.repeat([-1e4, 0.0, 1e4, 2e4, 3e4], 10),
    ],
    ids=["std 1000", "std 1e37", "ties", "largest", "smallest", "steps"],
)
def test_extreme_scores_have_finite_weights_and_gradients(scores, options):
    scores = jnp.asarray(scores, jnp.float32)
    weights, gradient = differentiate_sum(scores, **options)
    expected = expected_weights(scores, 5, **options)
    np.testing.assert_allclose(weights, expected, atol=2e-3)
    assert np.isfinite(gradient).all()


def test_fewer_tokens_than_k_and_no_tokens():
    np.testing.assert_array_equal(weigh(jnp.asarray(normal(0, 4)), 9.0), 1)
    assert soft_top_k(jnp.zeros((2, 0)), 3).shape == (2, 0)


def test_vmap_checkpoint_and_half_precision():
    scores = jnp.asarray(normal(5, 3, 20), jnp.float32)
    expected = expected_weights(np.asarray(scores), 4)
    np.testing.assert_allclose(weigh(scores, 4), expected, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(weigh, (0, None))(scores, 4), expected, atol=1e-6)

    def total(s):
        return jnp.sum(weigh(s, 4) ** 2)

    again, once = (jax.jit(jax.grad(f))(scores) for f in (jax.checkpoint(total), total))
    np.testing.assert_allclose(again, once, atol=1e-6)
    half = scores.astype(jnp.bfloat16)
    weights = weigh(half, 4)
    assert weights.dtype == jnp.bfloat16
    exact = weigh(half.astype(jnp.float32), 4)
    np.testing.assert_array_equal(weights, exact.astype(jnp.bfloat16))


# route


def test_routing_selects_the_largest_weights_and_the_earliest_of_ties():
    weights = jnp.asarray([[0.2, 1.0, 0.5, 1.0, 1.0], [0.0, 0.0, 0.0, 0.1, 0.0]])
    indices, taken, mask = route(weights, 3)
    np.testing.assert_array_equal(indices, [[1, 3, 4], [3, 0, 1]])
    np.testing.assert_array_equal(taken, np.asarray(weights)[np.arange(2)[:, None], indices])
    assert mask.all()


@FEW
@given(st.integers(0, 2**32 - 1))
def test_routing_agrees_with_sorting(seed):
    rng = np.random.default_rng(seed)
    weights = rng.integers(0, 4, (2, 3, 17)) / 3
    indices, taken, _ = route(jnp.asarray(weights, jnp.float32), 5)
    expected = np.argsort(-weights, axis=-1, kind="stable")[..., :5]
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_allclose(taken, np.take_along_axis(weights, expected, -1), rtol=1e-6)


def test_routing_never_selects_padding():
    weights = jnp.asarray([[0.9, 0.0, 0.4, 0.3], [0.9, 0.8, 0.7, 0.6]])
    mask = jnp.asarray([[False, True, True, False], [False, False, False, False]])
    indices, taken, is_token = route(weights, 3, mask=mask)
    np.testing.assert_array_equal(indices[0], [2, 1, 2])
    np.testing.assert_array_equal(is_token, [[True, True, False], [False, False, False]])
    np.testing.assert_allclose(taken, [[0.4, 0, 0], [0, 0, 0]])
    gradient = jax.grad(lambda w: jnp.sum(route(w, 3, mask=mask).weights))(weights)
    np.testing.assert_array_equal(gradient, mask)


def test_routing_selects_all_tokens_if_fewer():
    routing = route(jnp.asarray([[0.1, 0.3]]), 5)
    np.testing.assert_array_equal(routing.indices, [[1, 0]])


# The conditional layers, with linear maps and a fixed mixing of tokens as branches.

WIDTH = 4
LIGHT, HEAVY = normal(6, 2, WIDTH, WIDTH)


def light_attention(x):
    mixing = np.tri(x.shape[-2], k=1) - np.tri(x.shape[-2], k=-2)
    return jnp.einsum("ts,...sd->...td", mixing, x @ LIGHT)


def heavy_attention(queries, sources, mask):
    scores = jnp.einsum("...rd,...sd->...rs", queries @ HEAVY, sources)
    scores = jnp.where(mask[..., None, :], scores, -1e30)
    return jnp.einsum("...rs,...sd->...rd", jax.nn.softmax(scores, -1), sources)


def feed_forward(x, weights, mask, count):
    routing = route(weights, count, mask=mask)
    return conditional_feed_forward(x, lambda x: x @ LIGHT, lambda x: jnp.tanh(x @ HEAVY), routing)


def attention(x, query_weights, source_weights, mask, counts):
    queries = route(query_weights, counts[0], mask=mask)
    sources = route(source_weights, counts[1], mask=mask)
    return conditional_attention(x, light_attention, heavy_attention, queries, sources)


def chosen(weights, mask, count):
    """`[T]`: whether a token is among the `count` of largest weight."""
    order = np.argsort(-np.where(mask, weights, -1), kind="stable")[:count]
    return np.isin(np.arange(len(weights)), order) & mask


def feed_forward_by_definition(is_routed, x, weights):
    return x + x @ LIGHT + jnp.where(is_routed, weights, 0)[:, None] * jnp.tanh(x @ HEAVY)


def attention_by_definition(is_query, is_source, x, query_weights, source_weights):
    sources = source_weights[:, None] * x
    scores = jnp.where(is_source[None], x @ HEAVY @ sources.T, -jnp.inf)
    read = jax.nn.softmax(scores, -1) @ sources
    return x + light_attention(x) + jnp.where(is_query, query_weights, 0)[:, None] * read


def assert_same_values_and_gradients(actual, definitions, *arguments):
    """Compare `actual` on a batch with the definition on each of its rows."""
    cotangent = normal(7, *arguments[0].shape)
    y, pullback = jax.vjp(jax.jit(actual), *arguments)
    gradients = pullback(cotangent)
    for row, definition in enumerate(definitions):
        expected, expected_pullback = jax.vjp(jax.jit(definition), *(a[row] for a in arguments))
        np.testing.assert_allclose(y[row], expected, atol=1e-12)
        for have, want in zip(gradients, expected_pullback(cotangent[row]), strict=True):
            np.testing.assert_allclose(have[row], want, atol=1e-12)


LENGTHS = pytest.mark.parametrize(
    ("length", "counts"),
    [(2, (5, 1)), (13, (4, 6)), pytest.param(1, (1, 1), marks=pytest.mark.nightly)],
)


def padded_batch(length):
    """Return x, two sets of weights, and a mask: one sequence complete, one with a third of valid
    tokens."""
    x, weights = normal(8, 2, length, WIDTH), np.random.default_rng(9).uniform(size=(2, 2, length))
    mask = np.stack([np.ones(length, bool), np.arange(length) <= length // 3])
    return jnp.asarray(x), jnp.asarray(weights), mask


@pytest.mark.usefixtures("x64")
@LENGTHS
def test_feed_forward_is_that_of_the_definition(length, counts):
    x, (weights, _), mask = padded_batch(length)
    definitions = [
        partial(feed_forward_by_definition, chosen(w, m, counts[0]))
        for w, m in zip(weights, mask, strict=True)
    ]
    actual = partial(feed_forward, mask=jnp.asarray(mask), count=counts[0])
    assert_same_values_and_gradients(actual, definitions, x, weights)


@pytest.mark.usefixtures("x64")
@LENGTHS
def test_attention_is_that_of_the_definition(length, counts):
    x, weights, mask = padded_batch(length)
    definitions = [
        partial(attention_by_definition, chosen(wq, m, counts[0]), chosen(wkv, m, counts[1]))
        for wq, wkv, m in zip(*weights, mask, strict=True)
    ]
    actual = partial(attention, mask=jnp.asarray(mask), counts=counts)
    assert_same_values_and_gradients(actual, definitions, x, *weights)


def published_branch(case, name, x):
    x = x / jnp.linalg.norm(x, axis=-1, keepdims=True) * x.shape[-1] ** 0.5
    gamma, *maps = (
        case[f"param/{name}.{key}"]
        for key in ("0.gamma", "1.weight", "1.bias", "3.weight", "3.bias")
    )
    x = jnp.einsum("...d,d,hd->...h", x, gamma, maps[0]) + maps[1].reshape(1, 1, -1)
    x = jnp.einsum("...h,dh->...d", jax.nn.gelu(x, approximate=False), maps[2])
    return x + maps[3].reshape(1, 1, -1)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "is_straight_through", [True, pytest.param(False, marks=pytest.mark.nightly)]
)
def test_feed_forward_of_the_published_code(golden, is_straight_through):
    """The published layer has no residual, and can use weights of 1 with a straight-through
    gradient."""
    case = golden("colt5_ff")
    prefix = f"st{int(is_straight_through)}"

    def layer(x, router):
        routing = route(soft_top_k(jnp.einsum("btd,d->bt", x, router), 9 / 8 * 4, **SCALED), 4)
        if is_straight_through:
            w = routing.weights
            routing = routing._replace(weights=w + jax.lax.stop_gradient(1 - w))
        light, heavy = (partial(published_branch, case, n) for n in ("light_ff", "heavy_ff"))
        y = conditional_feed_forward(x, light, heavy, routing, residual=jnp.zeros_like(x))
        return y, routing

    arguments = jnp.asarray(case["x"]), jnp.asarray(case["param/router.routing_token"][0])
    y, pullback, routing = jax.vjp(jax.jit(layer), *arguments, has_aux=True)
    order = np.argsort(routing.indices), np.argsort(case[f"{prefix}/indices"])
    pairs = [
        (y, case[f"{prefix}/out"]),
        (
            np.take_along_axis(np.asarray(routing.weights), order[0], -1),
            np.take_along_axis(case[f"{prefix}/scores"], order[1], -1),
        ),
        (np.sort(routing.indices), np.sort(case[f"{prefix}/indices"])),
    ]
    d_x, d_router = pullback(jnp.ones_like(y))
    pairs += [(d_x, case[f"{prefix}/dx"]), (d_router, case[f"{prefix}/drouting"][0])]
    for have, want in pairs:
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-10)


def test_the_heavy_branch_gets_routed_tokens_only():
    x = jnp.asarray(normal(10, 2, 3, 50, WIDTH), jnp.float32)
    weights = jnp.asarray(np.random.default_rng(11).uniform(size=(2, 2, 3, 50)), jnp.float32)
    shapes = []

    def heavy(*arguments):
        shapes.extend(a.shape for a in arguments)
        return arguments[0]

    queries, sources = route(weights[0], 7), route(weights[1], 9)
    conditional_feed_forward(x, jnp.zeros_like, heavy, queries)
    y = conditional_attention(x, jnp.zeros_like, heavy, queries, sources)
    assert shapes == [(2, 3, 7, WIDTH), (2, 3, 7, WIDTH), (2, 3, 9, WIDTH), (2, 3, 9)]
    changed = np.any(np.asarray(y) != np.asarray(x), -1)
    assert np.all(changed.sum(-1) == 7)
    np.testing.assert_array_equal(np.take_along_axis(changed, np.asarray(queries.indices), -1), 1)


def test_nan_at_padding_has_no_effect_on_layers():
    x = normal(12, 6, WIDTH).astype(np.float32)
    mask = np.arange(6) < 3
    x[~mask] = np.nan
    weights = jnp.asarray([0.5, 0.1, 0.9, 1.0, 1.0, 1.0])

    @partial(jax.jit, static_argnames="layer")
    def total(x, layer):
        return jnp.sum(jnp.where(mask[:, None], layer(x), 0))

    def no_light(x):
        return jnp.where(mask[:, None], x, 0)

    routing = route(weights, 5, mask=jnp.asarray(mask))
    layers = (
        lambda x: conditional_feed_forward(x, no_light, lambda x: jnp.tanh(x @ HEAVY), routing),
        lambda x: conditional_attention(x, no_light, heavy_attention, routing, routing),
    )
    for layer in layers:
        value, gradient = jax.value_and_grad(total)(jnp.asarray(x), layer)
        assert np.isfinite(value)
        np.testing.assert_array_equal(gradient[~mask], 0)
        assert np.isfinite(gradient).all()


def test_routes_beyond_the_tokens_have_no_effect():
    """Straight-through weights are 1, and attention without sources may return NaN."""
    x = jnp.asarray(normal(15, 2, 6, WIDTH), jnp.float32)
    mask = jnp.asarray([[True] * 3 + [False] * 3, [False] * 6])
    routing = route(jnp.full((2, 6), 0.5), 5, mask=mask)
    w = routing.weights
    routing = routing._replace(weights=w + jax.lax.stop_gradient(1 - w))

    def heavy(x):
        return jnp.where(jnp.any(mask, -1)[:, None, None], 1.0, jnp.nan) * x

    y = conditional_feed_forward(x, jnp.zeros_like, heavy, routing)
    np.testing.assert_allclose(y, x * (1 + mask[..., None]), rtol=1e-6)


@pytest.mark.nightly
def test_layers_under_jit_and_vmap_in_half_precision_and_without_tokens():
    x, weights = normal(13, 3, 11, WIDTH), np.random.default_rng(14).uniform(size=(2, 3, 11))
    x, weights = jnp.asarray(x, jnp.float32), jnp.asarray(weights, jnp.float32)
    mask = jnp.ones((3, 11), bool)
    for layer, routers, counts in ((feed_forward, weights[:1], 4), (attention, weights, (4, 5))):
        expected = layer(x, *routers, mask, counts)
        actual = jax.jit(layer, static_argnums=2 + len(routers))(x, *routers, mask, counts)
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        actual = jax.vmap(lambda *a, layer=layer, counts=counts: layer(*a, counts))(
            x, *routers, mask
        )
        np.testing.assert_allclose(actual, expected, atol=1e-5)
        half = layer(x.astype(jnp.bfloat16), *routers, mask, counts)
        assert half.dtype == jnp.bfloat16
        np.testing.assert_allclose(half.astype(jnp.float32), expected, atol=0.1, rtol=0.05)
        nothing = [a[:, :0] for a in (x, *routers, mask)]
        assert layer(*nothing, counts).shape == (3, 0, WIDTH)


def test_layers_may_return_arrays_of_numpy():
    x, routing = np.ones((2, 9, 8), np.float32), route(jnp.ones((2, 9)), 3)
    y = conditional_feed_forward(x, lambda x: x, lambda x: x, routing)
    np.testing.assert_allclose(np.sort(y[0, :, 0]), [2] * 6 + [3] * 3)


ROUTING = Routing(jnp.zeros((3, 2), jnp.int32), jnp.ones((3, 2)), jnp.ones((3, 2), bool))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: soft_top_k(jnp.zeros(3, int), 1), "scores must be"),
        (lambda: soft_top_k(jnp.zeros(3), 0), "k must be positive"),
        (lambda: soft_top_k(jnp.zeros(3), 1, mask=jnp.ones((1, 3), bool)), "mask must have shape"),
        (
            lambda: soft_top_k(jnp.zeros(3), 1, mask=jnp.ones(3)),
            "mask must have a dtype of kind bool",
        ),
        (lambda: soft_top_k(jnp.zeros(3), 1, num_iterations=0), "num_iterations must be"),
        (lambda: soft_top_k(jnp.zeros(3), 1, epsilon=0.0), "epsilon must be positive"),
        (lambda: soft_top_k(jnp.zeros(3), 1, epsilon_decay=1.5), "epsilon_decay must be in"),
        (lambda: route(jnp.zeros(()), 1), "weights must be"),
        (lambda: route(jnp.zeros(3), 0), "num_routed must be"),
        (lambda: route(jnp.zeros(3), 1, mask=jnp.ones(2, bool)), "mask must have shape"),
        (lambda: layer_of(jnp.zeros(3)), "x must be"),
        (lambda: layer_of(jnp.zeros((5, 4))), "routing must have the batch axes"),
        (lambda: layer_of(residual=jnp.zeros((3, 5, 1))), "residual must have shape"),
        (lambda: layer_of(light=lambda x: x[..., :1]), "the result of light must have shape"),
        (lambda: layer_of(heavy=lambda x: x[..., :1]), "the result of heavy must have shape"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def layer_of(x=None, light=jnp.zeros_like, heavy=jnp.zeros_like, residual=None):
    x = jnp.zeros((3, 5, WIDTH)) if x is None else x
    return conditional_feed_forward(x, light, heavy, ROUTING, residual=residual)
