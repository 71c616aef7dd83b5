"""`log_attention_fn`, alone and inside Flax's own layers."""

import itertools
from functools import partial

import flax.linen as nn
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.attention import flax_fn, log_attention_fn
from tests.ops.log_attention.masks import (
    BATCH,
    CAUSAL,
    FULL,
    HEADS,
    INF,
    LENGTH,
    LENGTHS,
    MASKS,
    RANDOM,
    Arrays,
    arrays,
    average,
    cotangent_of,
)

WIDTH = 12
FEW_MASKS = "causal, padding", "of each head", "of keys, of each head"


@partial(jax.jit, static_argnames="is_causal")
def _traced(x: Arrays, mask, d_y, is_causal: bool):
    y, pullback = jax.vjp(lambda x: log_attention_fn(*x, mask=mask, is_causal=is_causal), x)
    return y, pullback(d_y)[0]


def check(x: Arrays, mask, *, is_causal: bool = False, is_traced: bool = True, unit: float = 1e-5):
    """Value and gradients against the oracle's."""
    d_y = cotangent_of(x)
    differentiate = _traced if is_traced else _traced.__wrapped__
    y, grads = differentiate(x, jnp.asarray(mask), d_y, is_causal=is_causal)
    tri = np.tri(x.query.shape[1], x.key.shape[1], dtype=bool)
    visible_mask = np.asarray(mask).astype(bool) & (tri | (not is_causal))
    expected, expected_grads = average(x, visible_mask, d_y)
    assert y.dtype == x.query.dtype
    np.testing.assert_allclose(y, expected, atol=unit)
    for name in Arrays._fields:
        have, want = getattr(grads, name), getattr(expected_grads, name)
        np.testing.assert_allclose(have, want, atol=unit * max(1, np.abs(want).max()), err_msg=name)


COMBINATIONS = list(itertools.product(MASKS, (True, False), (False, True)))
FEW_COMBINATIONS = [(name, True, False) for name in FEW_MASKS]
FEW_COMBINATIONS += [("of each head", True, True), ("causal, padding", False, False)]


@pytest.mark.parametrize(
    ("name", "is_traced", "is_causal"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{'traced' if case[1] else 'known'}-{'is_causal' if case[2] else ''}",
            marks=[pytest.mark.nightly] * (case not in FEW_COMBINATIONS),
        )
        for case in COMBINATIONS
    ],
)
def test_masks_are_applied(name, is_traced, is_causal):
    check(arrays(), MASKS[name], is_causal=is_causal, is_traced=is_traced)


@pytest.mark.parametrize(
    "name",
    [
        "of each head",
        pytest.param("causal", marks=pytest.mark.nightly),
        pytest.param("of keys, of each head", marks=pytest.mark.nightly),
    ],
)
def test_shared_key_value_heads(name):
    check(arrays(groups=2), MASKS[name])
    check(arrays(groups=1), MASKS[name], is_traced=False)


@pytest.mark.nightly
@hypothesis.settings(max_examples=6)
@hypothesis.given(
    st.tuples(*(st.sampled_from([1, size]) for size in FULL)),
    st.sampled_from([0.0, 0.05, 0.5, 0.95]),
    st.integers(0, 100),
    st.booleans(),
)
def test_masks_broadcast(shape, density, seed, is_causal):
    mask = np.random.default_rng(seed).uniform(size=shape) < density
    check(arrays(seed=seed), mask, is_causal=is_causal)


@pytest.mark.parametrize("is_causal", [False, True])
def test_without_a_mask(is_causal):
    x = arrays(groups=2)
    y = log_attention_fn(*x, is_causal=is_causal)
    expected = average(x, np.tri(LENGTH) if is_causal else np.ones(FULL))[0]
    np.testing.assert_allclose(y, expected, atol=1e-5)


def test_more_keys_than_queries():
    x = arrays()._replace(query=arrays().query[:, :6])
    mask = RANDOM[:, :, :6]
    y = jax.jit(log_attention_fn)(*x, mask=mask)
    np.testing.assert_allclose(y, average(x, mask)[0], atol=1e-5)
    y = log_attention_fn(*x)
    np.testing.assert_allclose(y, average(x, np.ones((6, LENGTH)))[0], atol=1e-5)


@pytest.mark.parametrize("std", [30.0, 1e3, 1e30])
@pytest.mark.parametrize("name", ["causal", "of each head", "of keys, of each head"])
def test_extreme_queries_and_keys(name, std):
    check(arrays(std), MASKS[name], unit=5e-6 * (1 + min(std, 1e3)) if std < 1e30 else 1e-5)


def test_a_score_far_below_the_rest_is_exact():
    """Query and key features that are alternately large, which underflow in any single product."""
    x = arrays()
    x.query[..., 0] += 300
    x.key[:, :-2, :, 1] += 300
    x.key[:, :, :, 0] -= 400
    check(x, RANDOM, unit=2e-3)


@pytest.mark.parametrize("of", ["query", "key"])
@pytest.mark.parametrize("name", ["causal", "of each head", "of keys, of each head"])
def test_log_zero(name, of):
    x = arrays()
    hidden = np.random.default_rng(3).uniform(size=(*x.query.shape[:-1], 1)) < 0.4
    getattr(x, of)[np.broadcast_to(hidden, x.query.shape)] = -INF
    getattr(x, of)[:, ::3, :, 1] = -INF
    check(x, MASKS[name])


@pytest.mark.parametrize("size", [1e-30, 1e15])
def test_sizes_of_values(size):
    x, d_y = arrays(), cotangent_of(arrays())
    y, grads = _traced(x._replace(value=np.float32(size) * x.value), RANDOM, d_y, is_causal=False)
    expected, expected_grads = average(x, RANDOM, d_y)
    np.testing.assert_allclose(y / size, expected, atol=1e-5)
    np.testing.assert_allclose(grads.query / size, expected_grads.query, atol=1e-5)
    np.testing.assert_allclose(grads.key / size, expected_grads.key, atol=1e-5)


@pytest.mark.parametrize("name", ["padding", "padding of keys"])
def test_nan_at_padding_has_no_effect(name):
    x, padding = arrays(), ~LENGTHS
    d_y = cotangent_of(x) * LENGTHS[..., None, None]
    clean = _traced(x, MASKS[name], d_y, is_causal=False)
    for array in x[1:]:
        array[padding] = np.nan
    if name == "padding":
        x.query[padding] = np.nan
    dirty = _traced(x, MASKS[name], d_y, is_causal=False)
    jax.tree.map(np.testing.assert_array_equal, clean, dirty)


def test_rows_without_visible_keys_are_zero():
    x, mask = arrays(), RANDOM.copy()
    mask[:, :, 4] = False
    mask[..., 7] = False
    y, grads = _traced(x, mask, cotangent_of(x), is_causal=False)
    assert not np.any(y[:, 4])
    assert not np.any(grads.query[:, 4])
    assert not np.any(grads.key[:, 7])
    assert not np.any(grads.value[:, 7])


def test_under_vmap():
    x = arrays()
    mapped = jax.vmap(lambda q, k, v, mask: log_attention_fn(q, k, v, mask=mask))
    np.testing.assert_allclose(mapped(*x, RANDOM), average(x, RANDOM)[0], atol=1e-5)


def refuse(*_):
    raise AssertionError("quadratic")


@pytest.mark.parametrize("name", ["causal", "causal, padding on the left", "everything"])
def test_masks_known_to_be_causal_cost_no_square(name, monkeypatch):
    monkeypatch.setattr(flax_fn, "masked_attention", refuse)
    x, mask = arrays(), MASKS[name]
    y = jax.jit(lambda *x: log_attention_fn(*x, mask=mask))(*x)  # a NumPy array, so static in `jit`
    np.testing.assert_allclose(y, average(x, mask)[0], atol=1e-5)
    np.testing.assert_allclose(log_attention_fn(*x, mask=jnp.asarray(mask)), y, atol=1e-5)
    with pytest.raises(AssertionError, match="quadratic"):
        jax.jit(log_attention_fn)(*x, mask=mask)


def test_masks_of_keys_cost_no_square(monkeypatch):
    monkeypatch.setattr(flax_fn, "masked_attention", refuse)
    check(arrays(), MASKS["padding of keys"])
    check(arrays(), MASKS["padding of keys"], is_causal=True)


@pytest.mark.parametrize("name", ["causal", "of each head"])
def test_bfloat16(name):
    x = Arrays(*(jnp.asarray(a, jnp.bfloat16) for a in arrays()))
    y = jax.jit(log_attention_fn)(*x, mask=MASKS[name])
    assert y.dtype == jnp.bfloat16
    expected = average(Arrays(*(np.asarray(a, np.float32) for a in x)), MASKS[name])[0]
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=0.01)
    same = log_attention_fn(*(a.astype(jnp.float32) for a in x), mask=MASKS[name], dtype=y.dtype)
    assert same.dtype == jnp.bfloat16


@pytest.mark.usefixtures("unchecked")
def test_unsupported_arguments_raise():
    x = arrays()
    for name, given in {
        "bias": {"bias": np.zeros(FULL)},
        "dropout_rate": {"dropout_rate": 0.1},
        "sow_weights": {"module": object()},
        "input_positions": {"input_positions": np.arange(LENGTH)},
        "qk_attn_weights_einsum": {"qk_attn_weights_einsum": jnp.einsum},
        "attn_weights_value_einsum": {"attn_weights_value_einsum": jnp.einsum},
        "implementation='chunked' with a mask": {"implementation": "chunked", "mask": RANDOM},
    }.items():
        with pytest.raises(NotImplementedError, match=f"log_attention_fn: {name}"):
            log_attention_fn(*x, **given)
    for message, given in {
        "mask must broadcast": {"mask": np.ones((BATCH, LENGTH, LENGTH, LENGTH))},
        "implementation must be": {"implementation": "nope"},
    }.items():
        with pytest.raises(ValueError, match=message):
            log_attention_fn(*x, **given)
    for mask in (None, np.ones((6, LENGTH))):
        with pytest.raises(ValueError, match="as many queries as keys"):
            log_attention_fn(x.query[:, :6], *x[1:], mask=mask, is_causal=True)
    with pytest.raises(TypeError, match="unknown"):
        log_attention_fn(*x, unknown=1)
    log_attention_fn(*x, dropout_rate=0.1, deterministic=True)


# Inside Flax's own layers.

X = np.random.default_rng(2).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)


few_masks_of_layers = pytest.mark.parametrize(
    "name",
    [
        "causal, padding",
        "of each head",
        pytest.param("causal", marks=pytest.mark.nightly),
        pytest.param("causal, documents", marks=pytest.mark.nightly),
    ],
)


def nnx_layer(**options) -> nnx.MultiHeadAttention:
    sizes = {"num_heads": HEADS, "in_features": WIDTH, "attention_fn": log_attention_fn}
    return nnx.MultiHeadAttention(**{**sizes, "decode": False, "rngs": nnx.Rngs(0), **options})


def linen_layer(**options) -> nn.MultiHeadDotProductAttention:
    options = {"num_heads": HEADS, "attention_fn": log_attention_fn, **options}
    return nn.MultiHeadDotProductAttention(**options)


def linen_parameters():
    return linen_layer().init(jax.random.key(0), X)


@few_masks_of_layers
def test_nnx_layer(name):
    for layer in (nnx_layer(), nnx_layer(num_kv_heads=2)):
        x = Arrays(*(np.asarray(part(X)) for part in (layer.query, layer.key, layer.value)))
        expected = layer.out(average(x, MASKS[name])[0].astype(np.float32))
        apply = nnx.jit(lambda layer, mask: layer(X, mask=mask))
        np.testing.assert_allclose(apply(layer, MASKS[name]), expected, atol=1e-5)
        np.testing.assert_allclose(layer(X, mask=MASKS[name]), expected, atol=1e-5)


@few_masks_of_layers
def test_linen_layer(name):
    parameters = linen_parameters()

    def project(part: str) -> np.ndarray:
        p = jax.tree.map(np.asarray, parameters["params"][part])
        return np.einsum("btd,dhk->bthk", X, p["kernel"]) + p["bias"]

    y = average(Arrays(*(project(part) for part in Arrays._fields)), MASKS[name])[0]
    out = jax.tree.map(np.asarray, parameters["params"]["out"])
    expected = np.einsum("bthk,hkd->btd", y, out["kernel"]) + out["bias"]
    apply = jax.jit(lambda mask: linen_layer().apply(parameters, X, mask=mask))
    np.testing.assert_allclose(apply(MASKS[name]), expected, atol=1e-5)


def test_is_causal_equals_a_causal_mask():
    layer, parameters = nnx_layer(), linen_parameters()
    expected = layer(X, mask=CAUSAL)
    np.testing.assert_allclose(layer(X, is_causal=True), expected, atol=1e-5)
    causal = linen_layer(attention_fn=partial(log_attention_fn, is_causal=True))
    expected = linen_layer().apply(parameters, X, mask=CAUSAL)
    np.testing.assert_allclose(causal.apply(parameters, X), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("num_kv_heads", "is_causal"),
    [
        (HEADS, False),
        (2, True),
        pytest.param(HEADS, True, marks=pytest.mark.nightly),
        pytest.param(2, False, marks=pytest.mark.nightly),
    ],
)
def test_nnx_decoding_equals_one_pass(num_kv_heads, is_causal):
    layer = nnx_layer(num_kv_heads=num_kv_heads)
    layer.init_cache((BATCH, LENGTH + 3, WIDTH))  # its end is never filled
    step = nnx.jit(lambda layer, x: layer(x, decode=True, is_causal=is_causal))
    steps = [step(layer, X[:, t : t + 1]) for t in range(LENGTH)]
    expected = layer(X, is_causal=True)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, atol=1e-5)


@pytest.mark.parametrize("is_causal", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_linen_decoding_equals_one_pass(is_causal):
    attention_fn = partial(log_attention_fn, is_causal=is_causal)
    layer = linen_layer(attention_fn=attention_fn, decode=True)
    cache = layer.init(jax.random.key(0), np.zeros((BATCH, LENGTH + 3, WIDTH)))["cache"]
    parameters = linen_parameters()
    step = jax.jit(lambda cache, x: layer.apply({**parameters, **cache}, x, mutable="cache"))
    steps, cache = [], {"cache": cache}
    for t in range(LENGTH):
        y, cache = step(cache, X[:, t : t + 1])
        steps.append(y)
    expected = linen_layer().apply(parameters, X, mask=CAUSAL)
    np.testing.assert_allclose(jnp.concatenate(steps, 1), expected, atol=1e-5)


def test_a_mask_is_combined_with_the_cache():
    """Padding on the left of a prompt, as when prompts of several lengths are continued
    together."""
    layer, valid = nnx_layer(), LENGTHS[:, None, None, ::-1]
    layer.init_cache(X.shape)
    step = nnx.jit(lambda layer, x: layer(x, mask=valid, decode=True))
    steps = jnp.concatenate([step(layer, X[:, t : t + 1]) for t in range(LENGTH)], 1)
    np.testing.assert_allclose(steps, layer(X, mask=valid, is_causal=True), atol=1e-5)


def test_unsupported_layers_raise():
    dropout = {"dropout_rate": 0.1, "deterministic": False}
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        nnx_layer(**dropout)(X)
    rngs = {"dropout": jax.random.key(1)}
    with pytest.raises(NotImplementedError, match="dropout_rate"):
        linen_layer(**dropout).apply(linen_parameters(), X, rngs=rngs)
    with pytest.raises(NotImplementedError, match="sow_weights"):
        nnx_layer()(X, sow_weights=True)
    with pytest.raises(NotImplementedError, match="sow_weights"):
        linen_layer().apply(linen_parameters(), X, sow_weights=True)
    names = "qk_attn_weights_einsum_cls", "attn_weights_value_einsum_cls"
    einsums = dict.fromkeys(names, lambda: jnp.einsum)
    with pytest.raises(NotImplementedError, match="qk_attn_weights_einsum"):
        linen_layer(**einsums).apply(linen_parameters(), X)
    np.testing.assert_array_equal(  # but not when nothing is dropped
        nnx_layer(dropout_rate=0.1, deterministic=True)(X), nnx_layer()(X)
    )


@pytest.mark.nightly
def test_layers_in_bfloat16():
    layer = nnx_layer(dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    y = layer(X, mask=CAUSAL)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float32), nnx_layer()(X, mask=CAUSAL), atol=0.05)
    layer.init_cache(X.shape, jnp.bfloat16)
    assert layer(X[:, :1], decode=True).dtype == jnp.bfloat16
