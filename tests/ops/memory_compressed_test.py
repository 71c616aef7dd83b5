from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from heinsen_jax.ops.memory_compressed import (
    CompressedCache,
    Compression,
    compress,
    memory_compressed_attention,
)

STATIC = ("is_causal", "pad", "return_state", "implementation")
jitted = jax.jit(memory_compressed_attention, static_argnames=STATIC)
PADS = ("left", "right")


def draw(length, sources, *, batch=(), heads=2, groups=1, factor=3):
    """Return query, key, value, and compressions that change head dimensions."""
    rng = np.random.default_rng(length)
    shapes = (length, heads, 4), (sources, groups, 3), (sources, groups, 5)
    arrays = [rng.standard_normal((*batch, *shape)) for shape in shapes]

    def compression(old, new):
        kernel = rng.standard_normal((groups, factor, old, new)) / np.sqrt(factor * old)
        return Compression(kernel, *rng.standard_normal((2, groups, new)))

    return [*arrays, compression(3, 4), compression(5, 6)]


def cast(arrays, dtype=np.float32):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), arrays)


def grouped(x, compression, pad):
    """Return for one head and batch entry the last tokens of groups, and their compressions."""
    kernel, bias, null = compression
    factor, length = kernel.shape[0], len(x)
    first = -(-length % factor) if pad == "left" else 0
    lasts, results = [-1], [null]
    for start in range(first, length, factor):
        tokens = [(f, x[start + f]) for f in range(factor) if 0 <= start + f < length]
        results.append(bias + sum(token @ kernel[f] for f, token in tokens))
        lasts.append(start + factor - 1)
    return lasts, results


def oracle(query, key, value, of_keys, of_values, *, is_causal, pad):
    """Definition for one batch entry, query by query."""
    y = np.zeros((*query.shape[:2], of_values.null.shape[-1]))
    for n in range(query.shape[1]):
        g = n // (query.shape[1] // key.shape[1])
        lasts, keys = grouped(key[:, g], Compression(*(x[g] for x in of_keys)), pad)
        _, values = grouped(value[:, g], Compression(*(x[g] for x in of_values)), pad)
        for t in range(len(query)):
            visible = [j for j, last in enumerate(lasts) if not is_causal or last <= t]
            scores = [query[t, n] @ keys[j] / np.sqrt(query.shape[-1]) for j in visible]
            weights = np.exp(np.array(scores) - max(scores))
            y[t, n] = sum(w * values[j] for w, j in zip(weights, visible, strict=True)) / sum(
                weights
            )
    return y


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("length", [12, 13])
def test_published_values(golden, length, is_causal):
    case = golden("memory_compressed")
    parameters = {k.removeprefix("param/"): x for k, x in case.items() if k.startswith("param/")}
    name = f"T{length}_causal{int(is_causal)}"
    x, heads, factor = case[f"{name}/x"], 4, 3
    depth = x.shape[-1] // heads
    kernel = parameters["compress_fn.conv.weight"].reshape(heads, depth, depth, factor)
    kernel, bias = np.moveaxis(kernel, -1, 1).swapaxes(2, 3), parameters["compress_fn.conv.bias"]
    nulls = (parameters[f"null_{name}"].reshape(heads, depth) for name in "kv")
    compressions = [Compression(kernel, bias.reshape(heads, depth), null) for null in nulls]
    query, key, value = (
        y.reshape(*x.shape[:-1], heads, depth)
        for y in np.split(np.einsum("btd,ed->bte", x, parameters["to_qkv.weight"]), 3, -1)
    )
    options = {"is_causal": is_causal, "scale": x.shape[-1] ** -0.5}
    y = jitted(query, key, value, *compressions, **options)
    out = np.einsum("btd,ed->bte", y.reshape(x.shape), parameters["to_out.weight"])
    out = out + parameters["to_out.bias"]
    np.testing.assert_allclose(out, case[f"{name}/out"], rtol=0, atol=1e-10)


CASES = [pytest.param(1, 1, 1, marks=pytest.mark.nightly), (100, 100, 7), (5, 31, 4)]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize(("length", "sources", "factor"), CASES)
def test_values_by_the_definition(length, sources, factor, pad):
    arrays = draw(length, sources, heads=4, groups=2, factor=factor)
    for is_causal in (False, True) if length == sources else (False,):
        options = {"is_causal": is_causal, "pad": pad}
        expected = oracle(*arrays, **options)
        np.testing.assert_allclose(jitted(*arrays, **options), expected, rtol=0, atol=1e-12)
        in_float32 = jitted(*cast(arrays), **options)
        assert in_float32.dtype == jnp.float32
        np.testing.assert_allclose(in_float32, expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "implementation", ["xla", pytest.param("tiled", marks=pytest.mark.nightly)]
)
def test_gradients_are_finite_differences(implementation):
    attend = partial(jitted, is_causal=True, implementation=implementation)
    check_grads(attend, draw(8, 8, batch=(2,)), 1, modes="rev", atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("pad", "implementation"),
    [("left", "xla"), pytest.param("right", "tiled", marks=pytest.mark.nightly)],
)
def test_is_causal(pad, implementation):
    query, key, value, *compressions = cast(draw(8, 8))
    options = {"is_causal": True, "pad": pad, "implementation": implementation}

    def outputs(key, value):
        return jnp.sum(jnp.sin(jitted(query, key, value, *compressions, **options)), (1, 2))

    # Tokens of the groups visible to each query: groups of 3, or a first one of 2.
    ends = [0, 0, 3, 3, 3, 6, 6, 6] if pad == "right" else [0, 2, 2, 2, 5, 5, 5, 8]
    for jacobian in jax.jit(jax.jacrev(outputs, (0, 1)))(key, value):
        for token, end in enumerate(ends):
            np.testing.assert_array_equal(jacobian[token, end:], 0)
            assert np.any(jacobian[token, :end] != 0, (-1, -2)).all()


@pytest.mark.parametrize(
    ("factor", "sizes"),
    [
        (3, (4, 0, 1, 6)),
        pytest.param(1, (4, 0, 1, 6), marks=pytest.mark.nightly),
        pytest.param(3, (1,) * 11, marks=pytest.mark.nightly),
    ],
)
def test_chunks_equal_one_pass(sizes, factor):
    query, key, value, *compressions = cast(draw(11, 11, batch=(2,), factor=factor))
    options = {"is_causal": True, "pad": "right"}
    whole = jitted(query, key, value, *compressions, **options)
    state, start = CompressedCache.empty((2,), *compressions, capacity=11), 0
    for size in sizes:
        tokens = np.s_[:, start : start + size]
        chunks = query[tokens], key[tokens], value[tokens]
        y, state = jitted(*chunks, *compressions, initial_state=state, return_state=True, **options)
        np.testing.assert_allclose(y, whole[tokens], atol=1e-6)
        start += size
    assert int(state.length) == 11
    groups = compress(key, *compressions[0][:2])[:, : 11 // factor]
    np.testing.assert_allclose(state.key, groups, atol=1e-6)


def test_more_tokens_than_the_capacity():
    query, key, value, *compressions = cast(draw(6, 6))
    options = {"is_causal": True, "pad": "right"}
    state = CompressedCache.empty((), *compressions, capacity=4)
    assert state.capacity == 5
    inputs = query, key, value, *compressions
    assert np.isnan(jitted(*inputs, initial_state=state, **options)).all()
    with pytest.raises(ValueError, match="capacity for 5 tokens, and this is token 6"):
        memory_compressed_attention(*inputs, initial_state=state, **options)


@pytest.mark.parametrize(
    ("pad", "sources"), [("left", 11), pytest.param("right", 11, marks=pytest.mark.nightly)]
)
def test_padding_equals_a_shorter_sequence(pad, sources):
    query, key, value, *compressions = draw(11, sources, batch=(5,))
    bounds = np.array([[0, sources], [2, 7], [0, 4], [3, 6], [5, 5]])
    for row, (first, end) in enumerate(bounds):
        for x in (key, value) if sources != 11 else (query, key, value):
            x[row, :first], x[row, end:] = np.nan, np.nan
    arrays = cast([query, key, value, *compressions])
    for is_causal in (False, True) if sources == 11 else (False,):
        options = {"is_causal": is_causal, "pad": pad}
        y, pullback = jax.vjp(partial(jitted, key_value_seq_lengths=bounds, **options), *arrays)
        for row, (first, end) in enumerate(bounds):
            queries = np.s_[first:end] if sources == 11 else np.s_[:]
            alone = query[row, queries], key[row, first:end], value[row, first:end]
            expected = oracle(*alone, *compressions, **options)
            np.testing.assert_allclose(y[row, queries], expected, atol=1e-5)
        gradients = pullback(jnp.ones_like(y))
        for gradient in jax.tree.leaves(gradients):
            assert np.isfinite(gradient).all()
        for row, (first, end) in enumerate(bounds):
            np.testing.assert_array_equal(gradients[1][row, :first], 0)
            np.testing.assert_array_equal(gradients[1][row, end:], 0)
    ends = jitted(*arrays, key_value_seq_lengths=bounds[:, 1], is_causal=is_causal, pad=pad)
    np.testing.assert_array_equal(ends[2], y[2])


@pytest.mark.parametrize(("length", "sources"), [(0, 0), (3, 0), (0, 4)])
def test_no_tokens(length, sources):
    """The null key is always visible."""
    arrays = cast(draw(length, sources))
    y = jitted(*arrays)
    assert y.shape == (length, 2, 6)
    if length:
        np.testing.assert_allclose(y, np.broadcast_to(arrays[4].null, (3, 2, 6)), rtol=1e-6)


X = np.ones((6, 2, 3), np.float32)
C = Compression(np.ones((2, 3, 3, 3), np.float32), *np.ones((2, 2, 3), np.float32))


@pytest.mark.parametrize(
    ("arrays", "options", "message"),
    [
        ((X, X, X, C, C), {"pad": "both"}, "pad must be"),
        ((X, X, X[:5], C, C), {}, "same tokens and heads"),
        ((X, X[:5], X[:5], C, C), {"is_causal": True}, "as many queries as keys"),
        ((X[..., :2], X, X, C, C), {}, "compresses keys to depth 3, but queries have 2"),
        ((X, X, X, C, C._replace(kernel=C.kernel[:, :2])), {}, "kernels of one width"),
        ((X, X, X, C._replace(kernel=C.kernel[0]), C), {}, "key_compression.kernel must be"),
        ((X, X, X, C, C._replace(null=C.null[0])), {}, "value_compression.null must have shape"),
        ((X, X, X, C, C._replace(bias=C.bias[0])), {}, "bias must have shape"),
        ((X, X, X[..., :2], C, C), {}, "as kernel"),
        ((X, X, X, C, C), {"key_value_seq_lengths": np.ones(3, int)}, "key_value_seq_lengths must"),
        (
            (X, X, X, C, C),
            {"is_causal": True, "pad": "right", "return_state": True},
            "needs an initial_state",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arrays, options, message):
    with pytest.raises(ValueError, match=message):
        memory_compressed_attention(*arrays, **options)


@pytest.mark.parametrize("options", [{"pad": "right"}, {"is_causal": True, "pad": "left"}])
@pytest.mark.usefixtures("unchecked")
def test_states_with_left_padding_raise(options):
    state = CompressedCache.empty((), C, C, capacity=6)
    with pytest.raises(NotImplementedError, match="initial_state: unsupported without"):
        memory_compressed_attention(X, X, X, C, C, initial_state=state, **options)
