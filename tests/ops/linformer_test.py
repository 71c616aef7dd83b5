from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from heinsen_jax.ops.linformer import linformer_attention

jitted = jax.jit(linformer_attention)


def draw(length, sources, *, batch=(), heads=2, groups=1, longest=None, rows=4, per_head=False):
    """query, key, value, key_projection, value_projection"""
    rng = np.random.default_rng(length)
    longest = sources if longest is None else longest
    shapes = (length, heads, 3), (sources, groups, 3), (sources, groups, 5)
    arrays = [rng.standard_normal((*batch, *shape)) for shape in shapes]
    shape = (groups, longest, rows) if per_head else (longest, rows)
    return arrays + [rng.standard_normal(shape) for _ in range(2)]


def single(arrays):
    return [x.astype(np.float32) for x in arrays]


def oracle(query, key, value, key_projection, value_projection):
    """Definition for one batch entry, query by query."""
    y = np.zeros((*query.shape[:-1], value.shape[-1]))
    sources, groups = key.shape[:2]
    for t, n in np.ndindex(*query.shape[:-1]):
        g = n // (query.shape[1] // groups)
        e, f = (x[g] if x.ndim == 3 else x for x in (key_projection, value_projection))
        rows = [sum(e[s, p] * key[s, g] for s in range(sources)) for p in range(e.shape[1])]
        values = [sum(f[s, p] * value[s, g] for s in range(sources)) for p in range(f.shape[1])]
        weights = [np.exp(query[t, n] @ row / np.sqrt(query.shape[-1])) for row in rows]
        y[t, n] = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
    return y


@pytest.mark.usefixtures("x64")
def test_published_values_and_gradients(golden):
    case = golden("linformer")
    parameters = {k.removeprefix("param/"): x for k, x in case.items() if k.startswith("param/")}

    @jax.jit
    def layer(x, parameters):
        def heads(name):
            y = jnp.einsum("btd,ed->bte", x, parameters[f"{name}.weight"])
            return y.reshape(*x.shape[:-1], 4, 4)

        projections = parameters["proj_k"], parameters["proj_v"]
        y = linformer_attention(heads("to_q"), heads("to_k"), heads("to_v"), *projections)
        y = jnp.einsum("btd,ed->bte", y.reshape(x.shape), parameters["to_out.weight"])
        return y + parameters["to_out.bias"][None, None]

    out, pullback = jax.vjp(layer, jnp.asarray(case["x"]), parameters)
    np.testing.assert_allclose(out, case["out"], rtol=0, atol=1e-10)
    dx, gradients = pullback(jnp.asarray(case["cotangent"]))
    np.testing.assert_allclose(dx, case["dx"], rtol=0, atol=1e-10)
    for name, gradient in gradients.items():
        np.testing.assert_allclose(gradient, case[f"grad/{name}"], rtol=0, atol=1e-10)
    shorter = layer(case["x"][:, :9], parameters)
    np.testing.assert_allclose(shorter, case["out_len9"], rtol=0, atol=1e-10)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(
    ("length", "sources", "longest", "rows"), [(1, 1, 1, 1), (63, 63, 100, 4), (5, 100, 100, 7)]
)
def test_values_by_the_definition(length, sources, longest, rows, per_head):
    arrays = draw(length, sources, heads=4, groups=2, longest=longest, rows=rows, per_head=per_head)
    arrays[3:] = [x / np.sqrt(sources) for x in arrays[3:]]
    expected = oracle(*arrays)
    np.testing.assert_allclose(jitted(*arrays), expected, rtol=0, atol=1e-11)
    in_float32 = jitted(*single(arrays))
    assert in_float32.dtype == jnp.float32
    np.testing.assert_allclose(in_float32, expected, rtol=0, atol=2e-5)


@pytest.mark.usefixtures("x64")
def test_gradients_are_finite_differences():
    arrays = draw(3, 5, batch=(2,), longest=6)
    check_grads(jitted, arrays, 1, modes="rev", atol=1e-6, rtol=1e-6)
    y, pullback = jax.vjp(jitted, *arrays)
    for gradient in pullback(y)[3:]:  # rows of missing positions
        np.testing.assert_array_equal(gradient[5:], 0)


@pytest.mark.parametrize(("sources", "bounds"), [(7, (2, 6)), (9, (0, 4)), (9, (0, 0))])
def test_padding_equals_a_shorter_input(sources, bounds):
    query, key, value, e, f = single(draw(7, sources, batch=(3,), longest=11))
    whole = jitted(query, key, value, e, f)
    first, end = bounds
    valid = np.s_[1:2, first:end]
    queries = valid if sources == 7 else np.s_[1:2]  # padded like keys if their number is equal
    expected = jitted(query[queries], key[valid], value[valid], e[first:], f[first:])
    for x in (query, key, value) if sources == 7 else (key, value):
        x[1, :first], x[1, end:] = np.nan, np.nan

    lengths = np.array([[0, sources], bounds, [0, sources]])
    call = partial(jitted, key_value_seq_lengths=lengths)
    y, pullback = jax.vjp(jax.jit(call), query, key, value, e, f)
    np.testing.assert_allclose(y[queries], expected, atol=1e-5)
    np.testing.assert_allclose(y[0], whole[0], atol=1e-6)
    gradients = pullback(jnp.ones_like(y))
    for gradient in gradients:
        assert np.isfinite(gradient).all()
    for gradient in gradients[1:3]:
        np.testing.assert_array_equal(gradient[1, :first], 0)
        np.testing.assert_array_equal(gradient[1, end:], 0)
    if end == 0:
        np.testing.assert_array_equal(y[1], 0)
        np.testing.assert_array_equal(gradients[0][1], 0)


def test_queries_without_keys_are_zero():
    y = jitted(*single(draw(3, 0, longest=4)))
    np.testing.assert_array_equal(y, np.zeros((3, 2, 5)))


X, E = np.ones((6, 2, 3), np.float32), np.ones((8, 4), np.float32)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ((X, X, X, E[:5], E), "key_projection supports at most 5 positions, got 6"),
        ((X, X, X, E, E[:5]), "value_projection supports at most 5 positions, got 6"),
        ((X, X, X, E, E[:, :3]), "the same number of rows"),
        ((X, X, X, E[0], E), "key_projection must be"),
        ((X, X, X, E, np.ones((3, 8, 4), np.float32)), "value_projection must have shape"),
        ((X, X, X, E.astype(int), E), "key_projection must have a dtype of kind floating"),
        ((X, X[:5], X, E, E), "same tokens and heads"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arrays, message):
    with pytest.raises(ValueError, match=message):
        linformer_attention(*arrays)
