from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops import l1_sparse
from heinsen_jax.ops.l1 import l1_attention
from heinsen_jax.ops.l1_sparse import edge_counts, l1_sparse_attention

MODES = {
    "noop": {"denominator_bias": 1.0},
    "plain": {"denominator_bias": 0.0},
    "exp": {"normalize": False},
}
each_graph = pytest.mark.parametrize("graph", ["graph", "full", "causal", "dup"])


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of at most 64 edges, the last one incomplete."""
    monkeypatch.setattr(l1_sparse, "NUMBERS", 1)
    jax.clear_caches()  # of calls with larger blocks
    yield
    jax.clear_caches()


def draw(batch=(), length=9, sources=11, heads=2, groups=2, depth=3, value_depth=4, seed=0):
    """Query, key, value and a cotangent, with some features of keys equal to those of queries."""
    rng = np.random.default_rng(seed)
    shapes = (
        (length, heads, depth),
        (sources, groups, depth),
        (sources, groups, value_depth),
        (length, heads, value_depth),
    )
    query, key, value, cotangent = (rng.standard_normal((*batch, *shape)) for shape in shapes)
    shared = min(length, sources)
    key[..., :shared, :, 0] = query[..., :shared, :groups, 0]
    return [query, key, value], cotangent


def random_edges(count: int, length: int = 9, sources: int = 11, seed: int = 0) -> np.ndarray:
    """Return edges with duplicates; none to destination 3."""
    rng = np.random.default_rng(seed)
    destination = rng.integers(0, length - 1, count)
    return np.stack([destination + (destination >= 3), rng.integers(0, sources, count)], 1)


def oracle(query, key, value, edges, *, denominator_bias=0.0, normalize=True, value_back=None):
    """Definition, edge by edge."""
    *batch, length, heads, depth = query.shape
    repeats = heads // key.shape[-2]
    key, value = np.repeat(key, repeats, -2), np.repeat(value, repeats, -2)
    total = np.full((*batch, length, heads), denominator_bias)
    weights = []
    for destination, source in edges:
        difference = np.abs(query[..., destination, :, :] - key[..., source, :, :])
        weights.append(np.exp(-difference.sum(-1) / np.sqrt(depth)))
        total[..., destination, :] += weights[-1]
    y = np.zeros((*query.shape[:-1], value.shape[-1]))
    back = None if value_back is None else np.zeros((*key.shape[:-1], value_back.shape[-1]))
    for (destination, source), weight in zip(edges, weights, strict=True):
        part = weight / total[..., destination, :] if normalize else weight
        y[..., destination, :, :] += part[..., None] * value[..., source, :, :]
        if back is not None:
            back[..., source, :, :] += part[..., None] * value_back[..., destination, :, :]
    return y if back is None else (y, back)


def simple(query, key, value, edges, *, denominator_bias=0.0, normalize=True, value_back=None):
    """Dense form, by the multiplicity `[..., T, S, N]` of each edge, for gradients."""
    repeats = query.shape[-2] // key.shape[-2]
    key, value = jnp.repeat(key, repeats, -2), jnp.repeat(value, repeats, -2)
    listed = np.zeros((query.shape[-3], key.shape[-3], 1))
    np.add.at(listed[..., 0], tuple(np.asarray(edges).T), 1)
    differences = query[..., :, None, :, :] - key[..., None, :, :, :]
    # |x| with derivative 0 at 0
    distances = jnp.sum(differences * jax.lax.stop_gradient(jnp.sign(differences)), -1)
    weights = jnp.exp(-distances / np.sqrt(query.shape[-1]))
    weights = weights * jnp.broadcast_to(listed, weights.shape)
    if normalize:
        total = denominator_bias + jnp.sum(weights, -2, keepdims=True)
        weights = weights / jnp.where(total == 0, 1.0, total)
    y = jnp.einsum("...tsn,...snv->...tnv", weights, value)
    if value_back is None:
        return y
    return y, jnp.einsum("...tsn,...tnv->...snv", weights, value_back)


def differentiate(function, arrays, cotangents):
    """Output and gradients, compiled together."""

    @jax.jit
    def both(arrays, cotangents):
        y, pullback = jax.vjp(function, *arrays)
        return y, pullback(cotangents)

    results = both(*jax.tree.map(jnp.asarray, (arrays, cotangents)))
    return [np.asarray(x) for x in jax.tree.leaves(results)]


def assert_all_close(actual, expected, error: float) -> None:
    for have, want in zip(actual, expected, strict=True):
        assert have.shape == want.shape
        np.testing.assert_allclose(have, want, rtol=0, atol=error * max(1, np.abs(want).max()))


def along(edges, attention=l1_sparse_attention, **options):
    return lambda query, key, value: attention(query, key, value, edges, **options)


def both_ways(edges, attention=l1_sparse_attention, **options):
    def function(query, key, value, value_back):
        return attention(query, key, value, edges, value_back=value_back, **options)

    return function


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("graph", "mode"),
    [
        ("graph", "plain"),
        ("causal", "noop"),
        ("dup", "exp"),
        pytest.param("graph", "noop", marks=pytest.mark.nightly),
        pytest.param("graph", "exp", marks=pytest.mark.nightly),
        pytest.param("full", "plain", marks=pytest.mark.nightly),
    ],
)
def test_values_and_gradients_of_the_published_code(golden, graph, mode):
    case = golden("l1_sparse")
    arrays = [case[name] for name in "qkv"]
    function = along(case[f"{graph}/co"], **MODES[mode])
    actual = differentiate(function, arrays, case["cotangent"])
    expected = [case[f"{graph}/{mode}/{name}"] for name in ("out", "dq", "dk", "dv")]
    assert_all_close(actual, expected, 1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("graph", [pytest.param("graph", marks=pytest.mark.nightly), "causal"])
def test_both_directions_of_the_published_code(golden, graph):
    """The published code returns the sum of both."""
    case = golden("l1_sparse")
    arrays = [case[name] for name in ("q", "k", "v", "vb")]
    attention = both_ways(case[f"{graph}/co"], denominator_bias=1.0)
    actual = differentiate(lambda *a: sum(attention(*a)), arrays, case["cotangent"])
    expected = [case[f"{graph}/bidi/{name}"] for name in ("out", "dq", "dk", "dvf", "dvb")]
    assert_all_close(actual, expected, 1e-10)


@each_graph
def test_edge_counts_of_the_published_code(golden, graph):
    case = golden("l1_sparse")
    coo, max_to_one, max_from_one = edge_counts(case[f"{graph}/co"])
    np.testing.assert_array_equal(coo, case[f"{graph}/coo"])
    assert coo.dtype == np.int32
    assert (max_to_one, max_from_one) == (case[f"{graph}/dst_mxlen"], case[f"{graph}/src_mxlen"])


def test_edge_counts_by_hand():
    edges = [[5, 0], [2, 0], [5, 1], [5, 0]]
    coo, max_to_one, max_from_one = edge_counts(np.array(edges))
    np.testing.assert_array_equal(coo[:, :2], edges)
    np.testing.assert_array_equal(coo[:, 2:], [[0, 0], [0, 1], [1, 0], [2, 2]])
    assert (max_to_one, max_from_one) == (3, 3)
    coo, *most = edge_counts(np.zeros((0, 2), int))
    assert coo.shape == (0, 4)
    assert most == [1, 1]


@pytest.mark.usefixtures("x64")
def test_worked_example_of_the_published_code(golden):
    case = golden("l1_toy")
    arrays = [jnp.asarray(case[name]) for name in "qkv"]
    y = l1_sparse_attention(*arrays, case["coo"], denominator_bias=1.0)
    np.testing.assert_allclose(y, case["out"], rtol=0, atol=1e-8)


ONE = {"length": 7, "sources": 1, "heads": 1, "groups": 1, "depth": 1, "value_depth": 1}
MANY = {"batch": (2,), "heads": 3, "groups": 1, "depth": 7, "value_depth": 1}


@pytest.mark.usefixtures("x64", "small_blocks")
@pytest.mark.parametrize(
    ("mode", "count", "shapes"),
    [
        ("exp", 63, {"batch": (1, 2), "heads": 4}),
        ("plain", 199, MANY),
        ("noop", 199, MANY),
        pytest.param("exp", 199, MANY, marks=pytest.mark.nightly),
        pytest.param("plain", 1, ONE, marks=pytest.mark.nightly),
    ],
)
def test_values_and_gradients_of_the_definition(mode, count, shapes):
    arrays, cotangent = draw(**shapes)
    length, sources = (x.shape[-3] for x in arrays[:2])
    edges = random_edges(count, length, sources)
    actual = differentiate(along(edges, **MODES[mode]), arrays, cotangent)
    by_hand = oracle(*arrays, edges, **MODES[mode])
    expected = differentiate(along(edges, simple, **MODES[mode]), arrays, cotangent)
    np.testing.assert_allclose(actual[0], by_hand, rtol=0, atol=1e-12)
    assert_all_close(actual, expected, 1e-12)
    np.testing.assert_array_equal(actual[0][..., 3, :, :], 0)


@pytest.mark.usefixtures("x64", "small_blocks")
@pytest.mark.parametrize(
    "mode",
    [
        "noop",
        pytest.param("plain", marks=pytest.mark.nightly),
        pytest.param("exp", marks=pytest.mark.nightly),
    ],
)
def test_both_directions_of_the_definition(mode):
    arrays, cotangent = draw(batch=(2,), heads=4)
    rng = np.random.default_rng(1)
    arrays.append(rng.standard_normal((2, 9, 4, 5)))
    cotangents = cotangent, rng.standard_normal((2, 11, 4, 5))
    edges = random_edges(101)
    actual = differentiate(both_ways(edges, **MODES[mode]), arrays, cotangents)
    by_hand = oracle(*arrays[:3], edges, value_back=arrays[3], **MODES[mode])
    expected = differentiate(both_ways(edges, simple, **MODES[mode]), arrays, cotangents)
    assert_all_close(actual[:2], by_hand, 1e-12)
    assert_all_close(actual, expected, 1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("is_causal", "bias"), [(True, 0.0), pytest.param(False, 1.0, marks=pytest.mark.nightly)]
)
def test_all_edges_equal_dense_attention(bias, is_causal):
    (query, key, value), _ = draw(length=9, sources=9)
    arrays = [jnp.asarray(x) for x in (query, key, value)]
    edges = np.argwhere(np.tri(9) > 0 if is_causal else np.ones((9, 9)))
    dense = partial(l1_attention, is_causal=is_causal, denominator_bias=bias)
    dense, sparse = (jax.jit(f)(*arrays) for f in (dense, along(edges, denominator_bias=bias)))
    np.testing.assert_allclose(sparse, dense, rtol=0, atol=1e-13)


@jax.jit
def attention_and_gradients(arrays, edges, cotangent):
    y, pullback = jax.vjp(along(edges), *arrays)
    return y, *pullback(cotangent)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10)
def test_the_order_of_edges_has_no_effect(seed):
    arrays, cotangent = draw(seed=seed)
    arrays, cotangent = [x.astype(np.float32) for x in arrays], cotangent.astype(np.float32)
    edges = random_edges(40, seed=seed)
    expected = attention_and_gradients(arrays, edges, cotangent)
    shuffled = np.random.default_rng(seed).permutation(edges)
    actual = attention_and_gradients(arrays, shuffled, cotangent)
    assert_all_close(actual, map(np.asarray, expected), 5e-6)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-3, 1000.0, 1e30]))
@settings(max_examples=10)
def test_extreme_inputs(seed, std):
    """Outputs are averages, with finite gradients."""
    arrays, cotangent = draw(seed=seed)
    arrays, cotangent = [(std * x).astype(np.float32) for x in arrays], cotangent.astype(np.float32)
    y, *gradients = attention_and_gradients(arrays, random_edges(40, seed=seed), cotangent)
    slack = 1e-5 * std
    assert np.all(y <= np.maximum(arrays[2].max(0), 0)[None] + slack)
    assert np.all(y >= np.minimum(arrays[2].min(0), 0)[None] - slack)
    for x in gradients:
        assert np.isfinite(x).all()


def test_a_destination_far_from_all_its_sources_still_averages():
    query, key, value = (jnp.full((2, 1, 1), x) for x in (1e4, 0.0, 3.0))
    edges = np.array([[0, 0], [0, 1]])
    y = l1_sparse_attention(query, key, value, edges)
    np.testing.assert_allclose(y[:, 0, 0], [3, 0])
    biased = l1_sparse_attention(query, key, value, edges, denominator_bias=1.0)
    np.testing.assert_array_equal(biased, 0)


def test_equal_queries_and_keys_have_no_gradient():
    same, value = np.ones((5, 1, 3), np.float32), np.arange(5, dtype=np.float32)[:, None, None]
    edges = random_edges(20, 5, 5)
    _, d_query, d_key, _ = differentiate(along(edges), [same, same, value], np.ones_like(value))
    np.testing.assert_array_equal(d_query, 0)
    np.testing.assert_array_equal(d_key, 0)


def test_tokens_without_edges_have_zero_gradients():
    arrays, cotangent = draw()
    edges = np.array([[0, 1], [4, 1], [4, 7]])
    _, d_query, d_key, d_value = differentiate(along(edges), arrays, cotangent)
    np.testing.assert_array_equal(np.delete(d_query, [0, 4], 0), 0)
    np.testing.assert_array_equal(d_query[0], 0)  # a single source has a weight of 1
    assert np.any(d_query[4] != 0)
    for gradient in (d_key, d_value):
        np.testing.assert_array_equal(np.delete(gradient, [1, 7], 0), 0)
        assert np.any(gradient[1] != 0)
        assert np.any(gradient[7] != 0)


def test_without_edges():
    arrays, cotangent = draw()
    nothing = np.zeros((0, 2), int)
    for x in differentiate(along(nothing), arrays, cotangent):
        np.testing.assert_array_equal(x, 0)
    empty = jnp.zeros((0, 2, 3))
    assert l1_sparse_attention(empty, empty, empty, nothing).shape == (0, 2, 3)


@pytest.mark.nightly
def test_traced_vmapped_and_checkpointed_edges_equal_concrete_ones():
    arrays, cotangent = draw(batch=(3,))
    arrays, cotangent = [x.astype(np.float32) for x in arrays], cotangent.astype(np.float32)
    edges = random_edges(30)
    expected = differentiate(along(edges), arrays, cotangent)
    eager = l1_sparse_attention(*map(jnp.asarray, arrays), jnp.asarray(edges))
    np.testing.assert_allclose(eager, expected[0], atol=1e-6)
    traced = attention_and_gradients(arrays, edges, cotangent)
    assert_all_close(traced, expected, 1e-6)
    for function in (jax.vmap(along(edges)), jax.checkpoint(along(edges))):
        assert_all_close(differentiate(function, arrays, cotangent), expected, 1e-6)

    graphs = np.stack([random_edges(30, seed=seed) for seed in range(3)])
    each = jax.jit(jax.vmap(l1_sparse_attention))(*arrays, graphs)
    for b in range(3):
        alone = oracle(*(x[b].astype(np.float64) for x in arrays), graphs[b])
        np.testing.assert_allclose(each[b], alone, atol=2e-6)


@pytest.mark.parametrize("wrong", [[9, 0], [-1, 0], [0, 11], [0, -1]])
@pytest.mark.usefixtures("unchecked")
def test_an_edge_out_of_range(wrong):
    arrays, _ = draw()
    arrays = [jnp.asarray(x, jnp.float32) for x in arrays]
    edges = np.concatenate([random_edges(5), [wrong]])
    for concrete in (edges, jnp.asarray(edges)):
        with pytest.raises(
            ValueError, match=r"edge 5 is .* destination < 9|destination < 9.*edge 5"
        ):
            l1_sparse_attention(*arrays, concrete)
    y = jax.jit(l1_sparse_attention)(*arrays, edges)
    assert np.isnan(y).all()


def test_memory_is_linear_in_the_edges():
    """Per edge only scores and weights are stored, far less than a feature vector."""

    def needed(count: int) -> int:
        x = jax.ShapeDtypeStruct((256, 2, 64), jnp.float32)
        edges = jax.ShapeDtypeStruct((count, 2), jnp.int32)
        lowered = jax.jit(attention_and_gradients).lower([x, x, x], edges, x)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    few, many = needed(100_000), needed(400_000)
    assert many < 4.5 * few
    assert many < 400_000 * 2 * 64 * 4 / 4


x, E = jnp.ones((2, 5, 4, 3)), np.array([[0, 1], [4, 2]])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((x[0, 0], x, x, E), {}, ValueError, "query must be"),
        ((x, x, x[:, :4], E), {}, ValueError, "same tokens and heads"),
        ((x, x, x, E[:, :1]), {}, ValueError, "edges must have shape"),
        ((x, x, x, E[0]), {}, ValueError, "edges must have shape"),
        ((x, x, x, E.astype(float)), {}, ValueError, "edges must have a dtype of kind integer"),
        ((x, x, x, E), {"denominator_bias": -1.0}, ValueError, "denominator_bias"),
        ((x, x, x, E), {"value_back": x[:, :4]}, ValueError, "value_back must have shape"),
        ((x, x, x, E), {"value_back": x.astype(int)}, ValueError, "value_back must have a dtype"),
        (
            (x, x, x, E),
            {"denominator_bias": 1.0, "normalize": False},
            NotImplementedError,
            "normalize=True",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arguments, options, error, message):
    with pytest.raises(error, match=message):
        l1_sparse_attention(*arguments, **options)


@pytest.mark.usefixtures("unchecked")
def test_edge_counts_of_invalid_edges_raises():
    with pytest.raises(ValueError, match="edges must have shape"):
        edge_counts(np.zeros((3, 4), int))
    with pytest.raises(ValueError, match="edges must have a dtype of kind integer"):
        edge_counts(np.zeros((3, 2)))


def test_second_derivatives_where_distances_are_equal():
    """With all edges, they equal the derivatives of dense attention."""
    rng = np.random.default_rng(0)
    query, value, first, second = rng.standard_normal((4, 3, 1, 2)).astype(np.float32)
    key = np.broadcast_to(rng.standard_normal((1, 1, 2)).astype(np.float32), (3, 1, 2))
    edges = np.array([(i, j) for i in range(3) for j in range(3)])

    def curvature(attend):
        def loss(key):
            return jnp.sum(first * attend(key))

        return jax.grad(lambda key: jnp.sum(second * jax.grad(loss)(key)))(key)

    sparse = curvature(lambda key: l1_sparse_attention(query, key, value, edges))
    dense = curvature(lambda key: l1_attention(query, key, value))
    assert np.abs(dense).max() > 1e-3
    np.testing.assert_allclose(sparse, dense, atol=1e-6)
