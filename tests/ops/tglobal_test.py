import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from heinsen_jax.ops.tglobal import block_sums, relative_position_bucket, tglobal_attention

STATIC = ("radius", "block_size", "max_distance", "is_causal")
jitted = jax.jit(tglobal_attention, static_argnames=STATIC)
summed = jax.jit(block_sums, static_argnames=("block_size", "is_causal"))


def draw(length, block_size, *, batch=(), heads=2, groups=1, num_buckets=8, depth=3):
    """query, key, value, global_key, global_value, local_bias, global_bias"""
    rng = np.random.default_rng(length)
    blocks = length // block_size
    shapes = [(length, heads, depth), (length, groups, depth), (length, groups, 5)]
    shapes += [(blocks, groups, depth), (blocks, groups, 5)]
    arrays = [rng.standard_normal((*batch, *shape)) for shape in shapes]
    return arrays + [rng.standard_normal((num_buckets, heads)) for _ in range(2)]


def call(function, arrays, **options):
    *arrays, local_bias, global_bias = arrays
    return function(*arrays, local_bias=local_bias, global_bias=global_bias, **options)


def single(arrays):
    return [x.astype(np.float32) for x in arrays]


def bucket_of(offset, num_buckets, max_distance, is_causal):
    """Compute with integers only: the largest b whose boundary is at most the distance."""
    if is_causal:
        side, base, distance = num_buckets, 0, max(-offset, 0)
    else:
        side = num_buckets // 2
        base, distance = side * (offset > 0), abs(offset)
    own = side // 2
    wide = side - own
    if distance < own:
        return base + distance
    # own * (max_distance / own) ** (b / wide) <= distance
    fits = [b for b in range(wide) if own**wide * max_distance**b <= distance**wide * own**b]
    return base + own + max(fits)


def oracle(arrays, *, radius, block_size, is_causal=False, real=None, max_distance=128):
    """Definition for one batch entry, query by query; tokens from `real` on are padding."""
    query, key, value, global_key, global_value, local_bias, global_bias = arrays
    length, heads, _ = query.shape
    real = length if real is None else real
    complete = real // block_size
    y = np.zeros((length, heads, value.shape[-1]))
    for t, n in np.ndindex(real, heads):
        g = n // (heads // key.shape[1])
        own = t // block_size if is_causal else min(t // block_size, complete - 1)
        bucket = partial(
            bucket_of,
            num_buckets=len(local_bias),
            max_distance=max_distance,
            is_causal=is_causal,
        )
        terms = []
        for s in range(real):
            if abs(s - t) <= radius and not (is_causal and s > t):
                score = query[t, n] @ key[s, g] + local_bias[bucket(s - t), n]
                terms.append((score, value[s, g]))
        for b in range(complete):
            if not is_causal or (b + 1) * block_size <= own * block_size:
                score = query[t, n] @ global_key[b, g] + global_bias[bucket(b - own), n]
                terms.append((score, global_value[b, g]))
        largest = max(score for score, _ in terms)
        weights = [np.exp(score - largest) for score, _ in terms]
        y[t, n] = sum(w * v for w, (_, v) in zip(weights, terms, strict=True)) / sum(weights)
    return y


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("kind", ["padded", "whole"])
def test_published_values(golden, kind):
    """The published normalization uses float32."""
    case = golden("longt5_tglobal")
    _, depth, heads, radius, block_size, _, max_distance = (int(x) for x in case["config"])
    x, mask = case["x"], case["mask"]
    lengths = mask.sum(-1) if kind == "padded" else None
    valid = mask == 1 if kind == "padded" else np.ones_like(mask, bool)

    def project(x, name):
        y = jnp.einsum("btd,ed->bte", x, case[f"param/{name}.weight"])
        return y.reshape(*x.shape[:-1], heads, depth)

    @jax.jit
    def layer(x):
        sums, ids = block_sums(x, block_size, key_value_seq_lengths=lengths)
        norm = jax.lax.rsqrt(jnp.mean(sums**2, -1, keepdims=True) + 1e-6)
        weight = case["param/global_input_layer_norm.weight"]
        summaries = sums * norm * weight[None, None]
        y = tglobal_attention(
            *(project(x, name) for name in "qkv"),
            *(project(summaries, name) for name in "kv"),
            radius=radius,
            block_size=block_size,
            local_bias=case["param/relative_attention_bias.weight"],
            global_bias=case["param/global_relative_attention_bias.weight"],
            max_distance=max_distance,
            key_value_seq_lengths=lengths,
        )
        return jnp.einsum("btd,ed->bte", y.reshape(x.shape), case["param/o.weight"]), sums, ids

    out, sums, ids = layer(x)
    expected = case["out" if kind == "padded" else "out_onesmask"]
    np.testing.assert_allclose(out[valid], expected[valid], rtol=0, atol=1e-6)
    if kind == "padded":
        np.testing.assert_array_equal(ids, case["block_ids"])
        np.testing.assert_allclose(sums, case["aggregates_sum"], rtol=0, atol=1e-10)
        np.testing.assert_array_equal(out[~valid], 0)


CASES = [
    (13, 20, 1),
    (100, 6, 7),
    pytest.param(1, 2, 3, marks=pytest.mark.nightly),
    pytest.param(7, 0, 16, marks=pytest.mark.nightly),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("length", "radius", "block_size"), CASES)
def test_values_by_the_definition(length, radius, block_size, is_causal):
    arrays = draw(length, block_size, heads=4, groups=2)
    options = {"radius": radius, "block_size": block_size, "is_causal": is_causal}
    options["max_distance"] = 20
    expected = oracle(arrays, **options)
    np.testing.assert_allclose(call(jitted, arrays, **options), expected, rtol=0, atol=1e-12)
    in_float32 = call(jitted, single(arrays), **options)
    assert in_float32.dtype == jnp.float32
    np.testing.assert_allclose(in_float32, expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("is_causal", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_gradients_are_finite_differences(is_causal):
    arrays = draw(11, 3, batch=(2,))
    options = {"radius": 2, "block_size": 3, "is_causal": is_causal}

    def attend(*arrays):
        return call(jitted, arrays, **options)

    check_grads(attend, arrays, 1, modes="rev", atol=1e-6, rtol=1e-6)


def layer(x, lengths=None, *, is_causal, radius=2, block_size=3):
    """One head, whose query, key and value are the input: sums and attention together."""
    sums, _ = summed(x, block_size, is_causal=is_causal, key_value_seq_lengths=lengths)
    heads = (y[..., None, :] for y in (x, x, x, sums, sums))
    options = {"radius": radius, "block_size": block_size, "is_causal": is_causal}
    return jitted(*heads, key_value_seq_lengths=lengths, **options)[..., 0, :]


@jax.jit
@jax.grad
def gradient_of(x, token):
    return jnp.sum(jnp.sin(layer(x, is_causal=True)[token]))


@pytest.mark.parametrize("token", [0, 2, 3, 9, 10])
def test_is_causal(token):
    x = np.random.default_rng(0).standard_normal((11, 4)).astype(np.float32)
    gradient = gradient_of(x, token)
    np.testing.assert_array_equal(gradient[token + 1 :], 0)
    # Blocks before its own, and two tokens before it, and itself.
    visible = {s for s in range(token + 1) if s >= token - 2 or s < token // 3 * 3}
    assert set(np.flatnonzero(np.any(gradient != 0, -1))) == visible


def test_sums_of_blocks_and_block_indices():
    x = np.arange(14, dtype=np.float32).reshape(2, 7, 1)
    sums, ids = summed(x, 3)
    np.testing.assert_array_equal(sums[..., 0], [[3, 18], [24, 67 - 7 - 8 - 9 + 3]])
    np.testing.assert_array_equal(ids, [[0, 0, 0, 1, 1, 1, 1]] * 2)
    sums, ids = summed(x, 3, is_causal=True)
    np.testing.assert_array_equal(sums[..., 0], [[3, 12], [24, 33]])
    np.testing.assert_array_equal(ids, [[0, 0, 0, 1, 1, 1, 2]] * 2)
    sums, ids = summed(x, 3, key_value_seq_lengths=np.array([5, 2]))
    np.testing.assert_array_equal(sums[..., 0], [[10, 0], [0, 0]])
    np.testing.assert_array_equal(ids, [[0, 0, 0, 0, 0, -1, -1], [-1] * 7])
    assert summed(x.astype(jnp.bfloat16), 3)[0].dtype == jnp.float32
    assert summed(x, 8)[0].shape == (2, 0, 1)


def test_biases_of_padded_sequences():
    arrays = draw(13, 3, batch=(2,), heads=2)
    options = {"radius": 2, "block_size": 3, "max_distance": 20}
    lengths = np.array([13, 7])
    for i, x in enumerate(arrays[3:5]):  # sums of blocks that are not complete
        arrays[3 + i] = np.where(np.arange(4)[None, :, None, None] < [[[[4]]], [[[2]]]], x, 0)
    y = call(jitted, single(arrays), key_value_seq_lengths=lengths, **options)
    for row, length in enumerate(lengths):
        expected = oracle([x[row] for x in arrays[:5]] + arrays[5:], real=length, **options)
        np.testing.assert_allclose(y[row], expected, atol=2e-5)


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(32, 128), (8, 20), (16, 100)])
@pytest.mark.parametrize("is_bidirectional", [True, False])
def test_buckets(num_buckets, max_distance, is_bidirectional):
    """At integer boundaries float32 may round down or up, by at most one bucket."""
    offsets = np.arange(-2 * max_distance, 2 * max_distance + 1)
    options = {"num_buckets": num_buckets, "max_distance": max_distance}
    actual = relative_position_bucket(offsets, is_bidirectional=is_bidirectional, **options)
    expected = [bucket_of(int(x), **options, is_causal=not is_bidirectional) for x in offsets]
    np.testing.assert_array_equal(actual, expected)
    assert set(np.asarray(actual)) >= {0, num_buckets - 1}


def test_t5s_buckets():
    """Values of T5: 32 buckets up to a distance of 128."""
    offsets = [0, -1, -7, -8, -11, -12, -127, -128, -1000, 1, 8, 128]
    expected = [0, 1, 7, 8, 8, 9, 15, 15, 15, 17, 24, 31]
    np.testing.assert_array_equal(relative_position_bucket(np.array(offsets)), expected)


def test_scale_and_no_bias():
    query, *rest = single(draw(13, 4))[:5]
    options = {"radius": 2, "block_size": 4}
    scaled = jitted(query, *rest, scale=0.5, **options)
    np.testing.assert_allclose(scaled, jitted(0.5 * query, *rest, **options), atol=1e-6)
    zeros = np.zeros((8, 2), np.float32)
    with_zeros = jitted(query, *rest, local_bias=zeros, global_bias=zeros, **options)
    np.testing.assert_array_equal(jitted(query, *rest, **options), with_zeros)


def test_no_array_is_as_large_as_all_pairs():
    """Scores are those of a token with three chunks of 16, and with 16 blocks."""
    arrays = single(draw(1024, 64))
    jaxpr = jax.make_jaxpr(lambda *x: call(tglobal_attention, x, radius=15, block_size=64))(*arrays)
    sizes = [math.prod(v.aval.shape) for eqn in jaxpr.eqns for v in eqn.outvars]
    assert max(sizes) <= 2 * 1024 * 48


X = np.ones((6, 2, 3), np.float32)
G = np.ones((2, 2, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((X, X, X, G[:1], G), {}, "global_key must have shape"),
        ((X, X, X, G, G[:1]), {}, "global_value must have shape"),
        ((X, X[:5], X[:5], G, G), {}, "as many queries as keys"),
        ((X, X, X, G, G), {"radius": -1}, "radius must not be negative"),
        ((X, X, X, G, G), {"block_size": 0}, "block_size must be at least 1"),
        ((X, X, X, G, G), {"local_bias": np.ones((8, 3), np.float32)}, "local_bias must have"),
        ((X, X, X, G, G), {"global_bias": np.ones((3, 2), np.float32)}, "num_buckets=3 must be"),
        ((X, X, X, G, G), {"key_value_seq_lengths": np.ones(3, int)}, "key_value_seq_lengths must"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arrays, options, message):
    with pytest.raises(ValueError, match=message):
        tglobal_attention(*arrays, **{"radius": 2, "block_size": 3} | options)


@pytest.mark.usefixtures("unchecked")
def test_padding_on_the_left_is_refused():
    with pytest.raises(NotImplementedError, match="padding on the left"):
        tglobal_attention(
            X, X, X, G, G, radius=2, block_size=3, key_value_seq_lengths=np.array([1, 6])
        )
    with pytest.raises(NotImplementedError, match="padding on the left"):
        block_sums(X[:, 0], 3, key_value_seq_lengths=np.array([1, 6]))


def test_buckets_of_positions_in_small_dtypes():
    positions = jnp.array([-3, 3, -100])
    wide = relative_position_bucket(positions)
    np.testing.assert_array_equal(relative_position_bucket(positions.astype(jnp.int8)), wide)
