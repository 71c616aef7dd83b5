import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops.additive import AdditiveState, additive_pooling, additive_weights

INF = float("inf")
OPTIONS = ("is_causal", "local_window_size", "return_state")

pooling = jax.jit(additive_pooling, static_argnames=OPTIONS)
weights_of = jax.jit(additive_weights, static_argnames=OPTIONS[:2])


def visible(length, *, is_causal=True, window=None, segment_ids=None, present=None):
    """[T, S] of one sequence, token by token."""
    ids = np.zeros(length, int) if segment_ids is None else segment_ids
    visible_mask = np.zeros((length, length), bool)
    for t, s in itertools.product(range(length), repeat=2):
        between = ids[min(s, t) : max(s, t) + 1]
        visible_mask[t, s] = (between == between[0]).all() and (present is None or present[s])
        if is_causal:
            visible_mask[t, s] &= s <= t and (window is None or t - s < window)
    return visible_mask


def oracle(x, logits, visible_mask):
    """Averages in float64, one after the other: x [B, T, N, D], visible [B, T, S]."""
    x, logits = np.asarray(x, np.float64), np.asarray(logits, np.float64)
    g = np.zeros_like(x)
    for b, t, n in np.ndindex(logits.shape):
        own = logits[b, visible_mask[b, t], n]
        if own.size and own.max() > -INF:
            weight = np.exp(own - own.max())
            g[b, t, n] = weight @ x[b, visible_mask[b, t], n] / weight.sum()
    return g


@jax.jit
def definition_gradients(x, logits, visible_mask, cotangent):
    """Return gradients of the averages as one softmax, by automatic differentiation."""

    def averages(x, logits):
        scores = jnp.where(visible_mask[..., None], logits[:, None], -INF)
        nothing = (scores == -INF).all(2, keepdims=True)
        weights = jax.nn.softmax(jnp.where(nothing, 0.0, scores), 2)
        return jnp.einsum("btsn,bsnd->btnd", jnp.where(nothing, 0.0, weights), x)

    return jax.vjp(averages, x, logits)[1](cotangent)


@partial(jax.jit, static_argnames=OPTIONS)
def differentiate(x, logits, cotangent, **options):
    g, pullback = jax.vjp(lambda *arrays: additive_pooling(*arrays, **options), x, logits)
    return g, *pullback(cotangent)


def value_and_pullback(function, cotangent, *arguments):
    value, pullback = jax.vjp(function, *arguments)
    return value, *pullback(cotangent)


def draw(length, batch=(2,), num_heads=2, depth=3, std=1.0, seed=0, dtype=np.float64):
    """Return x, logits and a cotangent."""
    rng = np.random.default_rng(seed)
    shape = *batch, length, num_heads
    x, cotangent = rng.standard_normal((2, *shape, depth)).astype(dtype)
    return x, (std * rng.standard_normal(shape)).astype(dtype), cotangent


def assert_as_defined(arrays, visible_mask, atol=1e-12, **options):
    """Compare values and gradients: x [B, T, N, D], visible [B, T, S]."""
    g, d_x, d_logits = differentiate(*arrays, **options)
    np.testing.assert_allclose(g, oracle(*arrays[:2], visible_mask), atol=atol, rtol=0)
    with jax.enable_x64(True):
        in_float64 = (jnp.asarray(x, jnp.float64) for x in arrays[:2])
        expected = definition_gradients(
            *in_float64, visible_mask, jnp.asarray(arrays[2], jnp.float64)
        )
    np.testing.assert_allclose(d_x, expected[0], atol=atol, rtol=atol)
    np.testing.assert_allclose(d_logits, expected[1], atol=atol, rtol=atol)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("length", "window"),
    [
        (1, None),
        (33, 32),
        (131, 97),
        pytest.param(32, 5, marks=pytest.mark.nightly),
        pytest.param(64, 1, marks=pytest.mark.nightly),
        pytest.param(100, 1000, marks=pytest.mark.nightly),
    ],
)
def test_values_and_gradients_by_definition(length, window):
    visible_mask = np.stack(2 * [visible(length, window=window)])
    assert_as_defined(draw(length), visible_mask, local_window_size=window)


@pytest.mark.usefixtures("x64")
def test_chunks_of_chunks_of_chunks():
    visible_mask = (np.tri(1153, dtype=bool) & ~np.tri(1153, k=-1027, dtype=bool))[None]
    arrays = draw(1153, batch=(1,), num_heads=1, depth=1)
    assert_as_defined(arrays, visible_mask, local_window_size=1027)


@pytest.mark.usefixtures("x64")
def test_bidirectional_values_and_gradients_by_definition():
    assert_as_defined(draw(37), np.ones((2, 37, 37), bool), is_causal=False)


IDS = np.stack(
    [np.repeat([4, 4, 1, 4], [40, 20, 1, 39]), np.repeat([0, 9, 8, 7, 6], [1, 1, 64, 31, 3])]
)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("is_causal", "window"),
    [pytest.param(True, None, marks=pytest.mark.nightly), (True, 40), (False, None)],
)
def test_segments(is_causal, window):
    visible_mask = [
        visible(100, is_causal=is_causal, window=window, segment_ids=ids) for ids in IDS
    ]
    options = {"is_causal": is_causal, "local_window_size": window}
    assert_as_defined(draw(100), np.stack(visible_mask), segment_ids=IDS, **options)


@pytest.mark.usefixtures("x64")
@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.sampled_from([1.0, 30.0, 1000.0]))
def test_any_segments_and_masked_tokens(seed, part, std):
    rng = np.random.default_rng(seed)
    with jax.enable_x64(True):
        x, logits, cotangent = draw(70, std=std, seed=seed)
        logits[rng.uniform(size=logits.shape) < part] = -INF
        ids = np.cumsum(rng.uniform(size=(2, 70)) < part / 4, 1)
        visible_mask = np.stack([visible(70, window=37, segment_ids=i) for i in ids])
        options = {"local_window_size": 37, "segment_ids": ids}
        assert_as_defined((x, logits, cotangent), visible_mask, atol=1e-9, **options)


@pytest.mark.parametrize(("std", "window"), [(30.0, 8), (1000.0, None), (1000.0, 50)])
def test_float32_is_as_exact_as_its_exponents(std, window):
    visible_mask = np.stack(2 * [visible(300, window=window)])
    arrays = draw(300, std=std, dtype=np.float32)
    assert_as_defined(arrays, visible_mask, atol=2e-6 * (3 + std), local_window_size=window)


@pytest.mark.parametrize("window", [None, 8, 50])
@pytest.mark.parametrize("offset", [-3e4, 3e4])
def test_weights_do_not_depend_on_the_size_of_logits(offset, window):
    """Chosen so that adding the offset is exact."""
    x, logits, cotangent = draw(300, dtype=np.float32)
    logits = np.round(logits * 64) / 64
    here, valid = (
        differentiate(x, logits + c, cotangent, local_window_size=window)
        for c in np.float32([0, offset])
    )
    for a, b in zip(here, valid, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6 * np.abs(a).max())


@pytest.mark.parametrize("window", [None, 8, 50])
@pytest.mark.parametrize("value", [0.0, -1000.0, 1e8])
def test_equal_logits_give_running_means(window, value):
    x, logits, cotangent = draw(300, dtype=np.float32)
    logits = np.full_like(logits, value)
    g, *_ = differentiate(x, logits, cotangent, local_window_size=window)
    sums = np.concatenate([np.zeros_like(x[:, :1]), np.cumsum(x, 1, np.float64)], 1)
    index = np.arange(1, 301)
    start = np.maximum(index - (window or 300), 0)
    expected = (sums[:, index] - sums[:, start]) / (index - start)[:, None, None]
    np.testing.assert_allclose(g, expected, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{}, {"local_window_size": 8}, {"local_window_size": 50}, {"is_causal": False}],
)
def test_finite_at_the_limits_of_the_range(options):
    x, logits, cotangent = draw(300, dtype=np.float32)
    x, logits = np.float32(3e38) * np.sign(x), np.float32(3e38) * np.sign(logits)
    g, *gradients = differentiate(x, logits, 1e-3 * cotangent, **options)
    assert np.max(np.abs(g)) < 3.01e38
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize("options", [{}, {"local_window_size": 8}, {"is_causal": False}])
def test_rows_without_visible_tokens_are_zero(options):
    x, logits, cotangent = draw(300, dtype=np.float32)
    nothing = differentiate(x, np.full_like(logits, -INF), cotangent, **options)
    for array in nothing:
        np.testing.assert_array_equal(array, 0)
    logits[:, 10:60] = -INF
    g, d_x, d_logits = differentiate(x, logits, cotangent, **options)
    assert np.isfinite(g).all()
    if "local_window_size" in options:
        np.testing.assert_array_equal((g == 0).all((0, 2, 3)).nonzero()[0], np.arange(17, 60))
    np.testing.assert_array_equal(d_x[:, 10:60], 0)
    np.testing.assert_array_equal(d_logits[:, 10:60], 0)
    assert np.isfinite(d_x).all()
    assert np.isfinite(d_logits).all()


@pytest.mark.usefixtures("x64")
def test_second_derivatives():
    x, logits, cotangent = map(jnp.asarray, draw(40, batch=(1,), num_heads=1, depth=2))
    visible_mask = jnp.tri(40, dtype=bool)[None] & ~jnp.tri(40, k=-35, dtype=bool)[None]

    def tested(x, logits, cotangent):
        return jax.vjp(partial(additive_pooling, local_window_size=35), x, logits)[1](cotangent)

    def defined(x, logits, cotangent):
        return definition_gradients(x, logits, visible_mask, cotangent)

    direction = jnp.asarray(draw(40, batch=(1,), num_heads=1, depth=2, seed=1)[0]), logits
    for have, want in zip(
        *(
            jax.jit(lambda *a, f=f: jax.vjp(f, *a)[1](direction))(x, logits, cotangent)
            for f in (tested, defined)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(have, want, atol=1e-12)


@pytest.mark.parametrize(
    ("window", "dtype"),
    [(2, np.float32), (5, jnp.bfloat16)],
)
def test_token_by_token_in_a_scan(window, dtype):
    x, logits, _ = (jnp.asarray(a, dtype) for a in draw(60))

    @jax.jit
    def stream(x, logits):
        def step(state, token):
            x, logits = (a[:, None] for a in token)
            g, state = additive_pooling(
                x, logits, local_window_size=window, initial_state=state, return_state=True
            )
            return state, g[:, 0]

        empty = AdditiveState.empty((2,), 2, 3, window, dtype)
        state, g = jax.lax.scan(step, empty, (jnp.moveaxis(x, 1, 0), jnp.moveaxis(logits, 1, 0)))
        return jnp.moveaxis(g, 0, 1), state

    have = stream(x, logits)
    want = pooling(x, logits, local_window_size=window, return_state=True)
    for a, b in zip(*map(jax.tree.leaves, (have, want)), strict=True):
        assert a.dtype == b.dtype
        tolerance = 1e-2 if a.dtype == jnp.bfloat16 else 2e-6
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=tolerance)


@pytest.mark.usefixtures("x64")
def test_a_state_of_bidirectional_averages():
    x, logits, _ = draw(30)
    _, state = pooling(x[:, :20], logits[:, :20], return_state=True)
    options = {"is_causal": False, "initial_state": state, "return_state": True}
    g, end = pooling(x[:, 20:], logits[:, 20:], **options)
    expected, expected_end = pooling(x, logits, is_causal=False, return_state=True)
    np.testing.assert_allclose(g, expected[:, 20:], atol=1e-12)
    np.testing.assert_allclose(end.logits, expected_end.logits, atol=1e-12)
    ids = np.repeat([[0, 1]], [4, 6], 1).repeat(2, 0)
    g, _ = pooling(x[:, 20:], logits[:, 20:], segment_ids=ids, **options)
    first, _ = pooling(x[:, 20:24], logits[:, 20:24], **options)
    np.testing.assert_allclose(g[:, :4], first, atol=1e-12)
    second = pooling(x[:, 24:], logits[:, 24:], is_causal=False)
    np.testing.assert_allclose(g[:, 4:], second, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_padding_on_both_sides_beside_segments():
    x, logits, cotangent = draw(60)
    bounds = np.asarray([[0, 41], [13, 60]])
    present = (np.arange(60) >= bounds[:, :1]) & (np.arange(60) < bounds[:, 1:])
    ids = np.where(present, np.arange(60) // 30, 99)  # padding is not a separate segment
    filled = np.stack([np.where(present[0], ids[0], 1), np.where(present[1], ids[1], 0)])
    visible_mask = [
        visible(60, window=20, segment_ids=i, present=p)
        for i, p in zip(filled, present, strict=True)
    ]
    options = {"segment_ids": ids, "key_value_seq_lengths": bounds, "local_window_size": 20}
    assert_as_defined((x, logits, cotangent), np.stack(visible_mask), **options)


def compiled(length, window):
    arrays = draw(length, batch=(1,), num_heads=1, depth=8, dtype=np.float32)
    return differentiate.lower(*arrays, local_window_size=window).compile()


def test_costs_are_linear_in_length_and_the_same_for_any_window():
    short, long = (compiled(length, 512) for length in (1024, 4096))
    memory = [c.memory_analysis().temp_size_in_bytes for c in (short, long)]
    assert memory[1] < 5 * memory[0]
    work = [c.cost_analysis()["flops"] for c in (compiled(4096, 4), long)]
    assert work[1] < 1.2 * work[0]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "options",
    [{}, {"local_window_size": 5}, {"is_causal": False}, {"segment_ids": IDS[:, 20:70]}],
)
def test_weights_give_the_averages(options):
    x, logits, _ = draw(50)
    logits[:, :3] = -INF
    lengths = np.asarray([50, 41])
    options = options | {"key_value_seq_lengths": lengths}
    weights = weights_of(logits, **options)
    g = pooling(x, logits, **options)
    np.testing.assert_allclose(np.einsum("btsn,bsnd->btnd", weights, x), g, atol=1e-12)
    total = np.sum(weights, 2)
    np.testing.assert_allclose(total, np.where(np.all(g == 0, -1), 0, 1), atol=1e-12)
    np.testing.assert_array_equal(weights[1, :, 41:], 0)


def test_weights_have_finite_gradients():
    logits = draw(10, dtype=np.float32)[1]
    logits[:, :3] = -INF

    @jax.jit
    def total(logits):
        return jnp.sum(additive_weights(logits)[:, :, 3] ** 2)

    gradient = jax.grad(total)(logits)
    assert np.isfinite(gradient).all()
    np.testing.assert_array_equal(gradient[:, :3], 0)


def published_logits(x, w, num_heads=4):
    """x `[B, T, N, D]` and w . x / sqrt(D), from the layout [B, T, N D]."""
    x, w = (jnp.asarray(a).reshape(*a.shape[:-1], num_heads, -1) for a in (x, w))
    return x, jnp.einsum("btnd,nd->btn", x, w) / np.sqrt(x.shape[-1])


def published_pooling(x, w, window, lengths=None):
    options = {"local_window_size": window, "key_value_seq_lengths": lengths}
    return additive_pooling(*published_logits(x, w), **options).reshape(x.shape)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("window", [1, 3, 64])
def test_published_pooling(golden, window):
    case = golden("additive_pool")
    function = jax.jit(partial(value_and_pullback, partial(published_pooling, window=window)))
    results = function(case["cotangent"], case["x"], case["w"])
    for name, have in zip(("g", "dx", "dw"), results, strict=True):
        np.testing.assert_allclose(have, case[f"w{window}/{name}"], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_published_states(golden):
    case = golden("additive_pool")
    x, logits = published_logits(case["x"], case["w"])
    state = AdditiveState.empty((2,), 4, 4, dtype=x.dtype)
    for t in range(12):
        token = slice(t, t + 1)
        _, state = pooling(x[:, token], logits[:, token], initial_state=state, return_state=True)
        total = np.exp(state.logits)[..., None]
        np.testing.assert_allclose(total[:, 0], case["rnn/z"][:, t], atol=1e-10)
        np.testing.assert_allclose((total * state.x)[:, 0], case["rnn/s"][:, t], atol=1e-10)


@pytest.mark.parametrize("size", [20, 60, 200])
@pytest.mark.parametrize(("name", "window"), [("w8", 8), ("global", None)])
def test_large_logits(golden, size, name, window):
    """The published code, which subtracts running sums, returns NaN or noise here."""
    case = golden("additive_pool")
    arrays = case[f"large{size}/x"], case[f"large{size}/w"]
    expected = case[f"large{size}/{name}/g_ref"]
    single = pooling(*map(np.float32, published_logits(*arrays)), local_window_size=window)
    np.testing.assert_allclose(single.reshape(expected.shape), expected, rtol=0, atol=2e-6 * size)
    with jax.enable_x64(True):
        double = pooling(*published_logits(*arrays), local_window_size=window)
    np.testing.assert_allclose(double.reshape(expected.shape), expected, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
def test_published_layer_with_padding(golden):
    """tests/attention/additive_test.py tests the layer without padding."""
    name, window = "w64/rightpad", 64
    case = golden("additive_attention_layer")
    mask = case[f"{name}/mask"]
    names = [k.removeprefix("param/") for k in case if k.startswith("param/")]

    def norm(x, name, p):
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        return x * p[f"{name}.weight"][None, None] + p[f"{name}.bias"][None, None]

    def layer(x, p):
        def pooled(x, w):
            return published_pooling(x, w, window, jnp.asarray(mask.sum(-1), int))

        h = norm(x, "attn_norm", p)
        query, key, value = (h @ p[f"W{n}.weight"].T for n in ("query", "keys", "values"))
        mixed = (pooled(query, p["query_attn"]) @ p["attn_proj.weight"].T) * key
        residual = h + mixed
        return residual + pooled(norm(residual, "mid_norm", p), p["key_attn"]) * value

    params = {k: case[f"param/{k}"] for k in names}
    used = mask[..., None] > 0
    cotangent = jnp.asarray(case["cotangent"]) * used
    out, d_x, d_params = jax.jit(partial(value_and_pullback, layer))(cotangent, case["x"], params)
    np.testing.assert_allclose(out * used, case[f"{name}/out"] * used, rtol=0, atol=1e-10)
    np.testing.assert_allclose(d_x, case[f"{name}/dx"], rtol=0, atol=1e-10)
    for k in names:
        np.testing.assert_allclose(d_params[k], case[f"{name}/grad/{k}"], rtol=0, atol=1e-10)


X, LOGITS = jnp.zeros((2, 6, 3, 4)), jnp.zeros((2, 6, 3))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": X[0]}, r"x must have shape \(2, 6, 3, 4\), got \(6, 3, 4\)"),
        ({"x": X[0, 0]}, r"x must be \[\.\.\., tokens, heads, depth\]"),
        ({"x": X.astype(int)}, "x must have a dtype of kind floating, got int32"),
        ({"logits": LOGITS[0, 0]}, r"logits must be \[\.\.\., tokens, heads\]"),
        ({"logits": LOGITS[:, :5]}, r"x must have shape \(2, 5, 3, 4\), got \(2, 6, 3, 4\)"),
        ({"logits": LOGITS.astype(int)}, "logits must be floating point, got int32"),
        ({"local_window_size": 0}, "local_window_size must be an integer >= 1 or a pair, got 0"),
        (
            {"local_window_size": True},
            "local_window_size must be an integer .* a pair, got True",
        ),
        ({"segment_ids": jnp.zeros((2, 5), int)}, r"segment_ids must have shape \(2, 6\)"),
        ({"segment_ids": jnp.zeros((2, 6))}, "segment_ids must have a dtype of kind integer"),
        ({"key_value_seq_lengths": jnp.zeros((3,), int)}, "key_value_seq_lengths must have shape"),
        (
            {"initial_state": AdditiveState.empty((2,), 3, 4, 4)},
            r"initial_state\.x must have shape \(2, 1, 3, 4\), got \(2, 3, 3, 4\)",
        ),
        (
            {"initial_state": AdditiveState.empty((2,), 3, 4), "local_window_size": 4},
            r"initial_state\.x must have shape \(2, 3, 3, 4\), got \(2, 1, 3, 4\)",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        additive_pooling(**({"x": X, "logits": LOGITS} | changes))


@pytest.mark.usefixtures("unchecked")
def test_a_state_of_other_logits_raises():
    state = AdditiveState(X[:, :1], LOGITS[:, :1, :2])
    message = r"initial_state\.logits must have shape \(2, 1, 3\), got \(2, 1, 2\)"
    with pytest.raises(ValueError, match=message):
        additive_pooling(X, LOGITS, initial_state=state)


def test_a_bidirectional_window_raises():
    with pytest.raises(
        NotImplementedError, match="local_window_size: unsupported with is_causal=False"
    ):
        additive_pooling(X, LOGITS, is_causal=False, local_window_size=3)
    with pytest.raises(
        NotImplementedError, match="local_window_size: unsupported with is_causal=False"
    ):
        additive_weights(LOGITS, is_causal=False, local_window_size=3)


def test_states_with_a_window_do_not_merge():
    state = AdditiveState.empty((), 1, 2, local_window_size=3)
    with pytest.raises(ValueError, match="states with a window cannot be merged"):
        state.merge(state)
