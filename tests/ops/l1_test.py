from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops import l1
from heinsen_jax.ops.l1 import l1_attention


@pytest.fixture
def small_tiles(monkeypatch):
    """Use tiles of about 48 queries and keys, so that short inputs have several."""
    monkeypatch.setattr(l1, "SCORES", 1)


@dataclass(frozen=True)
class Case:
    length: int
    sources: int | None = None
    batch: tuple[int, ...] = ()
    num_heads: int = 1
    num_kv_heads: int = 1
    key_depth: int = 3
    value_depth: int = 2
    is_causal: bool = False
    bias: float = 0.0
    query_offset: int = 0


CASES = (
    Case(1, 100, batch=(2,), num_heads=2, is_causal=True, query_offset=98),
    Case(63, batch=(1, 2), num_heads=4, num_kv_heads=2, key_depth=5),
    Case(100, is_causal=True, key_depth=17, bias=0.25),
    Case(127, num_heads=3, num_kv_heads=1, is_causal=True),
    Case(70, 65, num_heads=2, num_kv_heads=2, key_depth=1, value_depth=7, bias=1.0),
    Case(40, 30, is_causal=True, query_offset=-10),
)


def draw(case: Case, seed: int = 0, std: float = 1.0) -> tuple[list[np.ndarray], np.ndarray]:
    """Query, key and value, with some features of keys equal to those of queries; a cotangent."""
    rng = np.random.default_rng(seed)
    sources = case.sources or case.length
    shapes = (
        (case.length, case.num_heads, case.key_depth),
        (sources, case.num_kv_heads, case.key_depth),
        (sources, case.num_kv_heads, case.value_depth),
        (case.length, case.num_heads, case.value_depth),
    )
    query, key, value, cotangent = (std * rng.standard_normal((*case.batch, *s)) for s in shapes)
    shared = min(case.length, sources)
    key[..., :shared, :, 0] = query[..., :shared, : case.num_kv_heads, 0]
    return [query, key, value], cotangent / std


def sight(case: Case) -> np.ndarray:
    """`[T, S]`"""
    keys = np.arange(case.sources or case.length)
    queries = case.query_offset + np.arange(case.length)
    return (keys[None] <= queries[:, None]) | (not case.is_causal)


def oracle(query, key, value, visible, bias) -> np.ndarray:
    """Definition, query by query. `visible` is `[T, S]` or `[*B, T, S]`."""
    *batch, length, heads, depth = query.shape
    repeats = heads // key.shape[-2]
    visible = np.broadcast_to(visible, (*batch, length, key.shape[-3]))
    y = np.zeros((*batch, length, heads, value.shape[-1]))
    for *b, t, n in product(*map(range, (*batch, length, heads))):
        at = tuple(b)
        indices = np.flatnonzero(visible[(*at, t)])
        keys, values = key[at][indices, n // repeats], value[at][indices, n // repeats]
        scores = -np.abs(query[at][t, n] - keys).sum(-1) / np.sqrt(depth)
        largest = scores.max() if bias == 0 and len(indices) else 0.0
        weights = np.exp(scores - largest)
        if len(indices):
            y[(*at, t, n)] = weights @ values / (bias + weights.sum())
    return y


def distance(x):
    """|x|, with derivative 0 at 0."""
    return x * jax.lax.stop_gradient(jnp.sign(x))


def scores_of(query, key):
    """`[*B, S, T, N]`, as the published code lays them out."""
    differences = query[..., None, :, :, :] - key[..., :, None, :, :]
    return -jnp.sum(distance(differences), -1) / np.sqrt(query.shape[-1])


def simple(query, key, value, visible, bias):
    """Compute all scores; every query has visible keys or a bias."""
    repeats = query.shape[-2] // key.shape[-2]
    key, value = jnp.repeat(key, repeats, -2), jnp.repeat(value, repeats, -2)
    indices = jnp.moveaxis(jnp.asarray(visible), -1, -2)[..., None]
    scores = scores_of(query, key)
    indices = jnp.broadcast_to(indices, scores.shape)
    largest = jax.lax.stop_gradient(
        jnp.max(scores, -3, keepdims=True, where=indices, initial=-1e30)
    )
    largest = largest if bias == 0 else jnp.zeros_like(largest)
    weights = jnp.where(indices, jnp.exp(jnp.where(indices, scores - largest, 0.0)), 0.0)
    total = jnp.sum(weights, -3, keepdims=True) + bias
    weights = weights / jnp.where(total == 0, 1.0, total)
    return jnp.einsum("...stn,...snv->...tnv", weights, value)


def differentiate(function, arrays, cotangent):
    """Output and gradients, compiled together."""

    @jax.jit
    def both(arrays, cotangent):
        y, pullback = jax.vjp(function, *arrays)
        return y, *pullback(cotangent)

    results = both([jnp.asarray(x) for x in arrays], jnp.asarray(cotangent))
    return [np.asarray(x) for x in results]


def assert_all_close(actual, expected, error: float) -> None:
    for have, want in zip(actual, expected, strict=True):
        assert have.shape == want.shape
        np.testing.assert_allclose(have, want, rtol=0, atol=error * max(1, np.abs(want).max()))


def ours(case: Case, **arguments: Any):
    return partial(
        l1_attention,
        is_causal=case.is_causal,
        denominator_bias=case.bias,
        query_offset=case.query_offset,
        **arguments,
    )


@pytest.mark.usefixtures("x64", "small_tiles")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.nightly] * (case.length in (63, 100)), id=str(case))
        for case in CASES
    ],
)
def test_values_and_gradients_of_the_definition(case):
    arrays, cotangent = draw(case)
    actual = differentiate(ours(case), arrays, cotangent)
    by_hand = oracle(*arrays, sight(case), case.bias)
    expected = differentiate(lambda *a: simple(*a, sight(case), case.bias), arrays, cotangent)
    np.testing.assert_allclose(actual[0], by_hand, rtol=0, atol=1e-12)
    assert_all_close(actual, expected, 1e-12)


@pytest.mark.usefixtures("x64")
def test_scores_are_those_of_the_published_code(golden):
    """Check the oracle of the other tests."""
    case = golden("l1_dense")
    scores, pullback = jax.vjp(scores_of, jnp.asarray(case["q"]), jnp.asarray(case["k"]))
    np.testing.assert_allclose(scores, case["attn_bsdh"], rtol=0, atol=1e-12)
    gradients = pullback(jnp.asarray(case["cotangent_attn"]))
    assert_all_close(gradients, [case["attn_dq"], case["attn_dk"]], 1e-12)
    weights = jax.nn.softmax(scores, 1)
    np.testing.assert_allclose(weights, case["softmax_bsdh"], rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(("bias", "prefix"), [(0.0, ""), (1.0, "noop_")])
def test_values_and_gradients_of_the_published_code(golden, bias, prefix):
    case = golden("l1_dense")
    arrays = [case[name] for name in "qkv"]
    function = partial(l1_attention, denominator_bias=bias)
    actual = differentiate(function, arrays, case["cotangent_out"])
    expected = [case[prefix + name] for name in ("out", "dq", "dk", "dv")]
    assert_all_close(actual, expected, 1e-10)
    assert np.max(np.abs(actual[0] - case["wrong_softmax_axis_out"])) > 0.01


@pytest.mark.usefixtures("x64")
def test_worked_example_of_the_published_code(golden):
    case = golden("l1_toy")
    y = l1_attention(*(jnp.asarray(case[name]) for name in "qkv"), denominator_bias=1.0)
    np.testing.assert_allclose(y, case["out"], rtol=0, atol=1e-8)


@pytest.mark.usefixtures("x64", "small_tiles")
def test_streaming_equals_one_pass():
    """With a cache of keys and values, whose later entries are arbitrary finite numbers."""
    (query, key, value), _ = draw(Case(100, num_heads=2, num_kv_heads=2))
    whole = l1_attention(*map(jnp.asarray, (query, key, value)), is_causal=True)
    attend = jax.jit(partial(l1_attention, is_causal=True))
    for size in (1, 25):  # few lengths, since each is compiled
        for start in range(0, 100, size):
            tokens = slice(start, start + size)
            later = np.arange(100)[:, None, None] >= start + size
            cache = (jnp.asarray(np.where(later, 1e3, x)) for x in (key, value))
            y = attend(jnp.asarray(query[tokens]), *cache, query_offset=start)
            np.testing.assert_allclose(y, whole[tokens], rtol=0, atol=1e-13)


@pytest.mark.usefixtures("x64", "small_tiles")
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_segments_and_padding(is_causal):
    """Queries 0-2 of the first entry have no visible keys if causal; equal ids are one segment."""
    case = Case(70, batch=(2,), num_heads=2, num_kv_heads=1, is_causal=is_causal)
    arrays, cotangent = draw(case)
    segment_ids = np.repeat(np.array([[7, 0, 7], [1, 2, 3]], np.uint8), [30, 20, 20], 1)
    lengths = np.array([[3, 60], [0, 70]])
    valid = (np.arange(70) >= lengths[:, :1]) & (np.arange(70) < lengths[:, 1:])
    visible = sight(case)[None] & (segment_ids[:, :, None] == segment_ids[:, None]) & valid[:, None]
    assert visible[0, 40].any()
    assert visible[0, 0].any() != is_causal
    function = ours(
        case, segment_ids=jnp.asarray(segment_ids), key_value_seq_lengths=jnp.asarray(lengths)
    )
    padded = [np.where(valid[..., None, None], x, np.nan) for x in arrays]
    actual = differentiate(function, padded, cotangent)
    clean = [np.where(valid[..., None, None], x, 0.0) for x in arrays]
    expected = differentiate(lambda *a: simple(*a, visible, 0.0), clean, cotangent)
    np.testing.assert_allclose(actual[0], oracle(*clean, visible, 0.0), rtol=0, atol=1e-12)
    for have, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(have[valid], want[valid], rtol=0, atol=1e-12)
        assert np.isfinite(have).all()


def test_rows_without_visible_keys_are_zero_with_a_bias():
    arrays, cotangent = draw(Case(5))
    function = partial(l1_attention, key_value_seq_lengths=jnp.asarray(0), denominator_bias=1.0)
    for x in differentiate(function, arrays, cotangent):
        np.testing.assert_array_equal(x, 0)


@pytest.mark.usefixtures("small_tiles")
def test_float32_is_exact_to_rounding():
    case = Case(500, num_heads=2, num_kv_heads=2, key_depth=8, is_causal=True)
    arrays, cotangent = draw(case)
    single = [x.astype(np.float32) for x in (*arrays, cotangent)]
    actual = differentiate(ours(case), single[:3], single[3])
    with jax.enable_x64(True):
        double = [x.astype(np.float64) for x in single]
        expected = differentiate(lambda *a: simple(*a, sight(case), 0.0), double[:3], double[3])
    assert all(x.dtype == np.float32 for x in actual)
    assert_all_close(actual, expected, 3e-6)


RANDOM = Case(70, is_causal=True, key_depth=2)


@jax.jit
def value_and_gradients(arrays, cotangent):
    y, pullback = jax.vjp(ours(RANDOM), *arrays)
    return y, *pullback(cotangent)


@given(st.integers(0, 2**32 - 1), st.sampled_from([0.0, 1e-3, 1.0, 1000.0, 1e30]))
@settings(max_examples=15)
def test_extreme_inputs(seed, std):
    """Outputs are averages, with finite gradients; a single token is copied."""
    arrays, cotangent = draw(RANDOM, seed, max(std, 1e-30))
    arrays = [(x * (std > 0)).astype(np.float32) for x in arrays]
    y, *gradients = value_and_gradients(arrays, np.asarray(cotangent > 0, np.float32))
    value = arrays[2]
    np.testing.assert_allclose(y[0], value[0], rtol=1e-6)
    slack = 1e-5 * std
    assert np.all(y <= np.maximum.accumulate(value) + slack)
    assert np.all(y >= np.minimum.accumulate(value) - slack)
    for x in gradients:
        assert np.isfinite(x).all()


def test_std_1000_against_the_definition():
    case = Case(60, key_depth=2, is_causal=True)
    arrays, _ = draw(case, std=1000.0)
    arrays = [x.astype(np.float32) for x in arrays]
    y = ours(case)(*map(jnp.asarray, arrays))
    expected = oracle(*(x.astype(np.float64) for x in arrays), sight(case), 0.0)
    np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-2)


def test_a_bias_gives_zero_far_from_all_keys():
    query, key, value = np.full((3, 1, 2), 1e4), np.zeros((4, 1, 2)), np.ones((4, 1, 2))
    arrays = [jnp.asarray(x, jnp.float32) for x in (query, key, value)]
    np.testing.assert_array_equal(l1_attention(*arrays, denominator_bias=1.0), 0)
    np.testing.assert_allclose(l1_attention(*arrays), 1, rtol=1e-6)


def test_equal_queries_and_keys_have_no_gradient():
    same = np.ones((6, 2, 3), np.float32)
    value = np.random.default_rng(0).standard_normal((6, 2, 3)).astype(np.float32)
    y, d_query, d_key, _ = differentiate(l1_attention, [same, same, value], np.ones_like(value))
    np.testing.assert_allclose(y, np.broadcast_to(value.mean(0), y.shape), atol=1e-6)
    np.testing.assert_array_equal(d_query, 0)
    np.testing.assert_array_equal(d_key, 0)


@pytest.mark.usefixtures("small_tiles")
def test_each_entry_of_a_batch_may_have_its_own_offset():
    (query, key, value), _ = draw(Case(2, 100, batch=(3,)))
    arrays = [jnp.asarray(x, jnp.float32) for x in (query, key, value)]
    offsets = jnp.asarray([0, 50, 98])

    def one(query, key, value, offset):
        return l1_attention(query, key, value, is_causal=True, query_offset=offset)

    actual = jax.jit(jax.vmap(one))(*arrays, offsets)
    alone = jax.jit(one)
    for b, offset in enumerate((0, 50, 98)):
        expected = alone(*(x[b] for x in arrays), offset)
        np.testing.assert_allclose(actual[b], expected, atol=1e-6)


def test_without_tokens_or_without_keys():
    x, nothing = jnp.ones((3, 2, 4)), jnp.ones((0, 2, 4))
    assert l1_attention(nothing, x, x).shape == (0, 2, 4)
    np.testing.assert_array_equal(l1_attention(x, nothing, nothing), jnp.zeros((3, 2, 4)))


def test_memory_is_linear_in_the_length():
    def needed(length: int) -> int:
        x = jax.ShapeDtypeStruct((length, 4, 4), jnp.float32)

        def step(*arrays):
            y, pullback = jax.vjp(partial(l1_attention, is_causal=True), *arrays[:3])
            return pullback(arrays[3] + y)

        compiled = jax.jit(step).lower(x, x, x, x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    short, long = needed(4096), needed(16_384)
    assert long < 5 * short
    assert long < 16_384**2  # one byte per pair of tokens


x = jnp.ones((2, 5, 4, 3))


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ((x[0, 0], x, x), {}, "query must be"),
        ((x.astype(int), x, x), {}, "query must be floating point"),
        ((x, x[:1], x[:1]), {}, "batch axes"),
        ((x, x, x[:, :4]), {}, "same tokens and heads"),
        ((x[..., :2], x, x), {}, "same depth"),
        ((x, x[:, :, :3], x[:, :, :3]), {}, "multiple of num_kv_heads"),
        ((x, x, x), {"denominator_bias": -1.0}, "denominator_bias must be at least 0"),
        ((x, x, x), {"denominator_bias": float("nan")}, "denominator_bias"),
        ((x, x, x), {"query_offset": 1.5}, "query_offset"),
        ((x, x, x), {"query_offset": jnp.zeros(2, int)}, "query_offset"),
        ((x, x, x), {"segment_ids": jnp.zeros((2, 4), int)}, "segment_ids"),
        ((x[:, :4], x, x), {"segment_ids": jnp.zeros((2, 5), int)}, "segment_ids"),
        ((x, x, x), {"key_value_seq_lengths": jnp.zeros(3, int)}, "key_value_seq_lengths"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        l1_attention(*arguments, **options)
