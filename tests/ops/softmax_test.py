"""Softmax attention and its local forms: against the definition, and published results."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import local, masks
from heinsen_jax.ops.softmax import dot_product_attention

IMPLEMENTATIONS = ("xla", "tiled")
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
tiled_or_nightly = pytest.mark.parametrize(
    "implementation", [pytest.param("xla", marks=pytest.mark.nightly), "tiled"]
)


def by_definition(query, key, value, visible, scale=None, bias=0.0) -> np.ndarray:
    """`[B, T, N, V]` in float64, a query of one head at a time; visible `[B, N, T, S]`."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    heads = query.shape[2] // key.shape[2]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    y = np.zeros((*query.shape[:3], value.shape[-1]))
    for b, t, n in np.ndindex(query.shape[:3]):
        scores = scale * key[b, :, n // heads] @ query[b, t, n]
        scores = scores + np.broadcast_to(bias, visible.shape)[b, n, t]
        row = visible[b, n, t]
        if row.any():
            weights = np.exp(scores - scores[row].max(), where=row, out=np.zeros(len(scores)))
            y[b, t, n] = weights @ value[b, :, n // heads] / weights.sum()
    return y


def simply(query, key, value, visible):
    """The same, differentiable."""
    heads = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, heads, 2) for x in (key, value))
    scores = jnp.einsum("btnk,bsnk->bnts", query, key) / np.sqrt(query.shape[-1])
    weights = jnp.where(visible, jnp.exp(scores), 0.0)
    total = jnp.sum(weights, -1, keepdims=True)
    return jnp.einsum("bnts,bsnv->btnv", weights / jnp.where(total == 0, 1, total), value)


def draw(length: int, sources: int | None = None, std: float = 1.0, seed: int = 0):
    rng = np.random.default_rng(seed)
    shapes = (2, length, 4, 5), (2, sources or length, 2, 5), (2, sources or length, 2, 3)
    return [(std * rng.standard_normal(shape)).astype(np.float32) for shape in shapes]


LENGTH = 150
SEGMENTS = np.stack([np.arange(LENGTH) // 40, np.arange(LENGTH) // 97])
BOUNDS = np.array([[3, 131], [0, LENGTH]])
AT = np.arange(LENGTH)
BEHIND = AT[:, None] - AT[None]  # distance of a key behind a query
CAUSAL = BEHIND >= 0
SAME = (SEGMENTS[:, :, None] == SEGMENTS[:, None])[:, None]
THERE = ((BOUNDS[:, :1] <= AT) & (BOUNDS[:, 1:] > AT))[:, None, None]
GLOBAL = np.isin(AT, [0, 1, 100])
VARIANTS: dict[str, tuple[Any, dict[str, Any], np.ndarray]] = {
    "all": (dot_product_attention, {}, CAUSAL | True),
    "causal": (dot_product_attention, {"is_causal": True}, CAUSAL),
    "segments": (
        dot_product_attention,
        {"is_causal": True, "segment_ids": SEGMENTS},
        CAUSAL & SAME,
    ),
    "padding": (dot_product_attention, {"key_value_seq_lengths": BOUNDS}, CAUSAL & False | THERE),
    "rule": (dot_product_attention, {"mask": masks.Strided(7)}, BEHIND % 7 == 0),
    "window": (local.sliding_window_attention, {"local_window_size": 9}, CAUSAL & (BEHIND < 9)),
    "window, both sides": (
        local.sliding_window_attention,
        {"local_window_size": (3, 140), "is_causal": False},
        (BEHIND <= 3) & (BEHIND >= -140),
    ),
    "dilated": (
        local.dilated_attention,
        {
            "local_window_size": 5,
            "dilation": 8,
            "segment_ids": SEGMENTS,
            "key_value_seq_lengths": BOUNDS,
        },
        CAUSAL & (BEHIND <= 32) & (BEHIND % 8 == 0) & SAME & THERE,
    ),
    "longformer": (
        local.longformer_attention,
        {"local_window_size": 4, "global_positions": (100, 0, 1)},
        (abs(BEHIND) < 4) | GLOBAL[None] | GLOBAL[:, None],
    ),
    "longformer, causal": (
        local.longformer_attention,
        {"local_window_size": 4, "global_positions": (100, 0, 1), "is_causal": True},
        CAUSAL & ((BEHIND < 4) | GLOBAL[None] | GLOBAL[:, None]),
    ),
    "local blocks": (
        local.block_sparse_attention,
        {"pattern": "local", "block_size": 6},
        CAUSAL & (BEHIND < 6),
    ),
    "strided": (
        local.block_sparse_attention,
        {"pattern": "strided", "block_size": 6, "segment_ids": SEGMENTS},
        CAUSAL & (BEHIND % 6 == 0) & SAME,
    ),
    "fixed": (
        local.block_sparse_attention,
        {"pattern": "fixed", "block_size": 6, "num_summaries": 2},
        CAUSAL & ((AT[:, None] // 6 == AT // 6) | (AT % 6 >= 4)[None]),
    ),
}


TWINS = {"causal", "rule", "longformer, causal", "local blocks"}  # a different rule


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        pytest.param(
            name,
            implementation,
            marks=[pytest.mark.nightly] * (implementation == "xla" or name in TWINS),
        )
        for name in VARIANTS
        for implementation in IMPLEMENTATIONS
    ],
)
def test_values_and_gradients_are_those_of_the_definition(name, implementation):
    function, keywords, visible = VARIANTS[name]
    arrays = draw(LENGTH)
    visible = np.broadcast_to(visible, (2, 4, LENGTH, LENGTH))
    cotangent = np.cos(np.arange(2 * LENGTH * 4 * 3, dtype=np.float32)).reshape(2, LENGTH, 4, 3)

    @jax.jit
    def differentiate(*arrays):
        attention = partial(function, implementation=implementation, **keywords)
        y, pullback = jax.vjp(attention, *arrays)
        return y, pullback(cotangent)

    y, gradients = differentiate(*arrays)
    np.testing.assert_allclose(y, by_definition(*arrays, visible), atol=2e-6)
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in arrays]
        pullback = jax.vjp(lambda *arrays: simply(*arrays, visible), *wide)[1]
        expected = jax.tree.map(np.asarray, pullback(jnp.asarray(cotangent, jnp.float64)))
    for have, want in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(have, want, atol=1e-5)


@tiled_or_nightly
@pytest.mark.parametrize(("length", "sources"), [(1, 1), (1, 63), (129, 100), (257, 3)])
def test_odd_lengths(length, sources, implementation):
    arrays = draw(length, sources)
    y = jax.jit(partial(dot_product_attention, implementation=implementation))(*arrays)
    expected = by_definition(*arrays, np.ones((2, 4, length, sources), bool))
    np.testing.assert_allclose(y, expected, atol=2e-6)


@each_implementation
@pytest.mark.parametrize(("length", "sources"), [(0, 0), (0, 4), (5, 0)])
def test_no_visible_keys(length, sources, implementation):
    query, key, value = draw(5)
    query, key, value = query[:, :length], key[:, :sources], value[:, :sources]
    y = dot_product_attention(query, key, value, implementation=implementation)
    np.testing.assert_array_equal(y, np.zeros((2, length, 4, 3)))


@each_implementation
def test_large_scores_are_exact(implementation):
    """One key dominates: the output is its value, and nothing overflows."""
    query, key, value = draw(140, std=1000.0)
    attention = partial(dot_product_attention, is_causal=True, implementation=implementation)
    y = jax.jit(attention)(query, key, value)
    expected = by_definition(query, key, value, np.broadcast_to(np.tri(140) > 0, (2, 4, 140, 140)))
    np.testing.assert_allclose(y, expected, atol=0.5)  # scores of 1e6 are rounded to 0.06


@each_implementation
def test_queries_at_an_offset_among_the_keys(implementation):
    query, key, value = draw(150)
    visible = np.broadcast_to(np.tri(150) > 0, (2, 4, 150, 150))
    expected = by_definition(query, key, value, visible)
    attention = partial(dot_product_attention, is_causal=True, implementation=implementation)

    @jax.jit
    def at(query, offset):
        return attention(query, key, value, query_offset=offset)

    for offset in (0, 7, 130):
        y = at(query[:, offset : offset + 20], offset=offset)
        np.testing.assert_allclose(y, expected[:, offset : offset + 20], atol=2e-6)
    y = jax.jit(partial(attention, query_offset=7))(query[:, 7:], key, value)
    np.testing.assert_allclose(y, expected[:, 7:], atol=2e-6)


def test_global_tokens_may_have_separate_projections():
    arrays, own = draw(60), draw(60, seed=1)
    keywords = {"local_window_size": 5, "global_positions": (0, 30)}
    y = local.longformer_attention(*arrays, global_heads=tuple(own), **keywords)
    everything = dot_product_attention(*own)
    at, is_global = np.arange(60), np.isin(np.arange(60), [0, 30])
    visible = (abs(at[:, None] - at[None]) < 5) | is_global[None]
    expected = by_definition(*arrays, np.broadcast_to(visible, (2, 4, 60, 60)))
    np.testing.assert_allclose(y[:, ~is_global], expected[:, ~is_global], atol=2e-6)
    np.testing.assert_allclose(y[:, is_global], everything[:, is_global], atol=2e-6)
    y = local.longformer_attention(*arrays, global_heads=tuple(own), is_causal=True, **keywords)
    earlier = dot_product_attention(*own, is_causal=True)
    np.testing.assert_allclose(y[:, is_global], earlier[:, is_global], atol=2e-6)


def ours(x: np.ndarray) -> np.ndarray:
    """[B, N, T, K] -> [B, T, N, K]"""
    return np.swapaxes(x, 1, 2)


PUBLISHED = ("plain", "causal", "gqa1", "gqa2", "gqa3")


@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        ("mask", "xla"),
        ("bias", "xla"),
        *(
            pytest.param(name, implementation, marks=[pytest.mark.nightly] * (name != "gqa2"))
            for name in PUBLISHED
            for implementation in IMPLEMENTATIONS
        ),
    ],
)
def test_published_values_and_gradients(x64, golden, name, implementation):
    case = golden("sdpa_mha_gqa")
    keywords: dict[str, Any] = {"is_causal": name not in ("plain", "mask", "bias")}
    keywords |= {"mask": case["mask/bool"]} if name == "mask" else {}
    keywords |= {"bias": case["bias/bias"]} if name == "bias" else {}
    key, value = (case.get(f"{name}/{x}", case[x]) for x in "kv")
    attention = partial(dot_product_attention, implementation=implementation, **keywords)
    arrays = ours(case["q"]), ours(key), ours(value)

    @jax.jit
    def differentiate(arrays, cotangent):
        y, pullback = jax.vjp(attention, *arrays)
        return y, *pullback(cotangent)

    results = differentiate(arrays, ours(case["cotangent"]))
    for have, want in zip(results, ("out", "dq", "dk", "dv"), strict=True):
        np.testing.assert_allclose(have, ours(case[f"{name}/{want}"]), atol=1e-10)


@tiled_or_nightly
def test_published_local_forms(x64, golden, implementation):
    case = golden("sliding_window")
    options = {"implementation": implementation}
    window, dilated = local.sliding_window_attention, local.dilated_attention
    positions = np.flatnonzero(case["global/is_global"]).tolist()
    both = {"is_causal": False, **options}
    forms = {
        f"causal{size}/out": partial(window, local_window_size=size, **options)
        for size in (1, 3, 5)
    }
    forms |= {
        f"dilated_w{size}_d{step}/out": partial(
            dilated, local_window_size=(size, size), dilation=step, **both
        )
        for size, step in ((2, 2), (3, 3))
    }
    forms["global/out_shared_proj"] = partial(
        local.longformer_attention, local_window_size=(2, 2), global_positions=positions, **options
    )

    @jax.jit
    def compute(arrays, cotangent):
        results = {name: function(*arrays) for name, function in forms.items()}
        for size in (2, 4):
            sided = partial(window, local_window_size=(size, size), **both)
            y, pullback = jax.vjp(sided, *arrays)
            names = (f"onesided{size}/{x}" for x in ("out", "dq", "dk", "dv"))
            results |= dict(zip(names, (y, *pullback(cotangent)), strict=True))
        return results

    results = compute([case[name] for name in "qkv"], case["cotangent"])
    assert len(results) == 14
    for name, have in results.items():
        np.testing.assert_allclose(have, case[name], atol=1e-10, err_msg=name)


@pytest.mark.parametrize(
    ("name", "pattern", "summaries"),
    [("local_4", "local", 1), ("strided_4", "strided", 1), ("fixed_4_c1", "fixed", 1)],
)
def test_published_sparse_patterns(golden, name, pattern, summaries):
    expected = golden("sparse_transformer_masks")[name] > 0
    rule = local.block_rule(pattern, 4, summaries) & masks.Causal()
    at = np.arange(16)
    np.testing.assert_array_equal(rule(at[:, None], at[None]), expected)


@pytest.mark.parametrize(
    ("function", "keywords", "error", "message"),
    [
        (dot_product_attention, {"implementation": "fast"}, ValueError, "None or one of .*'fast'"),
        (dot_product_attention, {"implementation": "cudnn"}, NotImplementedError, "needs a GPU"),
        (
            dot_product_attention,
            {"implementation": "tiled", "bias": np.zeros((1, 1, 4, 4))},
            NotImplementedError,
            'implementation="tiled" has no bias; "xla" has',
        ),
        (
            dot_product_attention,
            {"implementation": "tiled", "mask": np.ones((1, 1, 4, 4), bool)},
            NotImplementedError,
            'implementation="tiled" has no mask as an array; "xla" has',
        ),
        (dot_product_attention, {"local_window_size": 0}, ValueError, "local_window_size must be"),
        (dot_product_attention, {"local_window_size": (-1, 2)}, ValueError, "must be a pair"),
        (dot_product_attention, {"local_window_size": (1, 0, 0)}, ValueError, "must be a pair"),
        (dot_product_attention, {"segment_ids": np.zeros(3, int)}, ValueError, "segment_ids must"),
        (local.dilated_attention, {"local_window_size": 2, "dilation": 0}, ValueError, "dilation"),
        (
            local.longformer_attention,
            {"local_window_size": 2, "global_positions": [4]},
            ValueError,
            r"global_positions must be in 0 \.\. 3, got \[4\]",
        ),
        (local.block_sparse_attention, {"block_size": 0}, ValueError, "block_size must be"),
        (
            local.block_sparse_attention,
            {"block_size": 2, "num_summaries": 3},
            ValueError,
            "num_summaries must be in",
        ),
        (
            local.block_sparse_attention,
            {"block_size": 2, "pattern": "diagonal"},
            ValueError,
            "'local', 'strided' or 'fixed', not 'diagonal'",
        ),
        (dot_product_attention, {"mask": 2 * np.ones((4, 4), int)}, ValueError, "mask must have a"),
        (dot_product_attention, {"mask": np.ones((4, 4))}, ValueError, "mask must have a dtype"),
        (dot_product_attention, {"mask": np.ones((4, 3), bool)}, ValueError, "mask must broadcast"),
        (dot_product_attention, {"bias": np.ones((3, 4))}, ValueError, "bias must broadcast to"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_unsupported_calls_raise(function, keywords, error, message):
    with pytest.raises(error, match=message):
        function(*[jnp.zeros((2, 4, 1, 3))] * 3, **keywords)


def test_tiles_that_a_traced_offset_masks_are_skipped():
    """Keys and values after the last query are not read; under `vmap` they may be, as zeros."""
    query, key, value = draw(1024)
    query = query[:, :200]
    attend = partial(dot_product_attention, is_causal=True, implementation="tiled")
    expected = {offset: attend(query, key, value, query_offset=offset) for offset in (0, 130, 500)}
    late = np.where(np.arange(1024) < 768, 0, np.nan).astype(np.float32)[None, :, None, None]
    traced = jax.jit(lambda offset, *arrays: attend(*arrays, query_offset=offset))
    for offset, y in expected.items():
        np.testing.assert_allclose(traced(offset, query, key + late, value + late), y, atol=2e-6)
    rows = jax.vmap(lambda offset: attend(query, key, value, query_offset=offset))
    np.testing.assert_allclose(rows(jnp.array([*expected])), [*expected.values()], atol=2e-6)


def with_decays(query, key, value, log_decay, offset=0):
    """The definition of causal attention with decays, for queries from an offset on."""
    heads = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, heads, 2) for x in (key, value))
    total = jnp.cumsum(log_decay, 1)
    scores = jnp.einsum("btnk,bsnk->btsn", query, key) / np.sqrt(query.shape[-1])
    scores = scores + total[:, offset : offset + query.shape[1], None] - total[:, None]
    visible = np.tri(query.shape[1], key.shape[1], offset, bool)[None, :, :, None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), 2)
    return jnp.einsum("btsn,bsnv->btnv", weights, value)


def differentiate(function, arrays, cotangent):
    y, pullback = jax.vjp(function, *arrays)
    return y, *pullback(cotangent)


@each_implementation
def test_chunks_at_a_traced_offset(implementation):
    """Values and gradients, with a cache whose end is not filled yet."""
    _, key, value = draw(700)
    query, _, _ = draw(200, seed=1)
    log_decay = -np.random.default_rng(0).random((2, 700, 4), np.float32)
    cotangent = np.cos(np.arange(2 * 200 * 4 * 3, dtype=np.float32)).reshape(2, 200, 4, 3)

    @jax.jit
    def ours(offset, *arrays):
        def attend(query, key, value, log_decay):
            options = {"is_causal": True, "implementation": implementation}
            options |= {
                "query_offset": offset,
                "key_value_seq_lengths": offset + np.int32([200] * 2),
            }
            return dot_product_attention(query, key, value, log_decay=log_decay, **options)

        return differentiate(attend, arrays, cotangent)

    arrays = query, key, value, log_decay
    for offset in (0, 130, 500):
        have = ours(offset, *arrays)
        with jax.enable_x64(True):
            wide = jax.tree.map(np.float64, arrays)
            want = differentiate(partial(with_decays, offset=offset), wide, np.float64(cotangent))
        for a, b in zip(have, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@each_implementation
@pytest.mark.parametrize("decay", [1e-3, 1.0, 12.0])
@pytest.mark.usefixtures("as_users_compile")
def test_decays_are_accurate_in_float32(implementation, decay):
    """Values and gradients, also far from the first token."""
    rng = np.random.default_rng(0)
    tokens, heads, groups = (1, 600), 4, 2
    query = rng.standard_normal((*tokens, heads, 8)).astype(np.float32)
    key, value = rng.standard_normal((2, *tokens, groups, 8)).astype(np.float32)
    log_decay = np.float32(-decay * rng.uniform(0.9, 1.1, (*tokens, heads)))
    cotangent = rng.standard_normal(query.shape).astype(np.float32)
    arrays = query, key, value, log_decay

    def ours(query, key, value, log_decay):
        options = {"is_causal": True, "implementation": implementation}
        return dot_product_attention(query, key, value, log_decay=log_decay, **options)

    have = jax.jit(partial(differentiate, ours))(arrays, cotangent)
    with jax.enable_x64(True):
        wide = jax.tree.map(np.float64, (arrays, cotangent))
        want = jax.jit(partial(differentiate, with_decays))(*wide)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * np.abs(b).max() + 4e-6)


def test_decays_must_fit():
    x, decay = np.zeros((1, 4, 2, 3), np.float32), np.zeros((1, 4, 2), np.float32)
    with pytest.raises(ValueError, match="log_decay: decays need causal attention"):
        dot_product_attention(x, x, x, log_decay=decay)
    with pytest.raises(ValueError, match=r"log_decay: 4 queries from query_offset=1 on"):
        dot_product_attention(x, x, x, log_decay=decay, is_causal=True, query_offset=1)


def test_queries_beyond_their_number_are_zero():
    query, key, value = np.random.default_rng(0).standard_normal((3, 2, 7, 2, 4)).astype(np.float32)
    lengths = np.array([3, 7])
    y = dot_product_attention(query, key, value, query_seq_lengths=lengths)
    whole = dot_product_attention(query, key, value)
    np.testing.assert_array_equal(y[0, 3:], 0)
    np.testing.assert_array_equal(y[0, :3], whole[0, :3])
    np.testing.assert_array_equal(y[1], whole[1])


def test_cudnn_is_given_masks_and_biases_of_all_sequences(monkeypatch):
    """`[T, S]` is broadcast to `[B, N, T, S]`."""
    shapes = {}

    def recorded(query, key, value, bias, mask, **options):
        shapes.update(bias=bias.shape, mask=mask.shape)
        return query

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", recorded)
    x = jnp.ones((3, 8, 1, 2))
    options = {"mask": jnp.ones((8, 8), bool), "bias": jnp.ones((1, 8, 8))}
    dot_product_attention(x, x, x, implementation="cudnn", **options)
    assert shapes == {"bias": (3, 1, 8, 8), "mask": (3, 1, 8, 8)}


def test_strict_promotion_of_biases_and_offsets(x64):
    x, bias = jnp.ones((1, 4, 1, 8), jnp.bfloat16), jnp.zeros((4, 4), jnp.bfloat16)

    def attend(x, offset):
        return dot_product_attention(x, x, x, bias=bias, is_causal=True, query_offset=offset)

    with jax.numpy_dtype_promotion("strict"):
        assert jax.eval_shape(attend, x, jnp.int32(0)).dtype == jnp.bfloat16


def test_global_heads_of_traced_queries_beside_segments_of_numpy():
    ids = np.repeat([[0, 1]], [4, 5], 1)

    def attend(*heads):
        options = {"local_window_size": 2, "global_positions": [0, 4], "segment_ids": ids}
        return local.longformer_attention(*heads, global_heads=heads, **options)

    heads = np.random.default_rng(0).standard_normal((3, 1, 9, 2, 2)).astype(np.float32)
    np.testing.assert_allclose(jax.jit(attend)(*heads), attend(*heads), atol=1e-6)


def test_second_derivatives_where_scores_are_equal():
    """Tiles recompute scores; the largest ones have the derivatives of others."""
    rng = np.random.default_rng(0)
    key, value, first, second = rng.standard_normal((4, 3, 1, 2)).astype(np.float32)

    def curvature(implementation):
        def loss(query):
            y = dot_product_attention(query, key, value, implementation=implementation)
            return jnp.sum(first * y)

        zeros = jnp.zeros((3, 1, 2))
        return jax.grad(lambda query: jnp.sum(second * jax.grad(loss)(query)))(zeros)

    np.testing.assert_allclose(curvature("tiled"), curvature("xla"), atol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "tiled"])
def test_queries_beyond_their_number_have_no_effect_on_gradients(implementation):
    x = jnp.ones((3, 1, 2))
    query = x.at[2].set(jnp.nan)
    options = {"query_seq_lengths": jnp.array(2), "implementation": implementation}
    gradient = jax.grad(lambda value: dot_product_attention(query, x, value, **options).sum())(x)
    np.testing.assert_allclose(gradient, 2 / 3, rtol=1e-6)


@pytest.mark.parametrize("implementation", ["xla", "tiled"])
@pytest.mark.usefixtures("x64")
def test_arrays_of_other_dtypes_are_promoted(implementation):
    x = jnp.ones((5, 1, 2), jnp.float32)
    decay = jnp.full((5, 1), -0.25)
    assert decay.dtype == jnp.float64
    options = {"is_causal": True, "implementation": implementation}
    y = dot_product_attention(x, x, 2.0 * x, log_decay=decay, **options)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, 2, rtol=1e-6)
