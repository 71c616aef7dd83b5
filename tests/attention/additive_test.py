"""The Fastformer layer against the published one, and its importance weights."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention
from heinsen_jax.attention.additive import AdditiveAttention
from heinsen_jax.attention.parameters import LayerNorm

pytestmark = pytest.mark.usefixtures("x64")


class Published(nnx.Module):
    """The published layer: the residual stream continues from the normalized input."""

    def __init__(self, window: int):
        options: dict[str, Any] = {"param_dtype": jnp.float64, "rngs": nnx.Rngs(0)}
        sizes = {"model_dim": 16, "num_heads": 4}
        self.norm = LayerNorm(16, dtype=None, **options)
        self.attention = attention.build("additive", **sizes, window_size=window, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norm(x)
        return x + self.attention(x)

    def named(self) -> Iterator[tuple[str, nnx.Param, bool]]:
        """Yield published names, parameters, and whether these are transposed."""
        layer = self.attention
        for name, norm in (("attn_norm", self.norm), ("mid_norm", layer.norm)):
            yield f"{name}.weight", norm.scale, False
            yield f"{name}.bias", norm.bias, False
        dense = {"Wquery": layer.query, "Wkeys": layer.key, "Wvalues": layer.value}
        for name, projection in (dense | {"attn_proj": layer.project}).items():
            yield f"{name}.weight", projection.kernel, True
        yield "query_attn", layer.query_weights, False
        yield "key_attn", layer.key_weights, False

    def take(self, arrays: Mapping[str, np.ndarray]) -> None:
        for name, parameter, is_turned in self.named():
            value = arrays[f"param/{name}"]
            parameter[...] = jnp.asarray(value.T if is_turned else value)


@pytest.mark.parametrize("window", [1, 4, 64])
def test_published_layer(golden, window):
    case = golden("additive_attention_layer")
    layer = Published(window)
    layer.take(case)
    graph, parameters = nnx.split(layer)
    call = jax.jit(lambda parameters, x: nnx.merge(graph, parameters)(x))
    y, pullback = jax.vjp(call, parameters, jnp.asarray(case["x"]))
    gradients, d_x = pullback(jnp.asarray(case["cotangent"]))
    np.testing.assert_allclose(y, case[f"w{window}/none/out"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(d_x, case[f"w{window}/none/dx"], rtol=0, atol=1e-10)
    for name, gradient, is_turned in nnx.merge(graph, gradients).named():
        expected = case[f"w{window}/none/grad/{name}"]
        expected = expected.T if is_turned else expected
        np.testing.assert_allclose(gradient[...], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("window", [None, 3])
def test_importance_gives_the_weights_of_averages(window):
    layer = attention.build(
        "additive",
        model_dim=12,
        num_heads=3,
        window_size=window,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    assert isinstance(layer, AdditiveAttention)
    keys = jax.random.split(jax.random.key(0), 3)
    layer.query_weights[...] = 3 * jax.random.normal(keys[0], (12,))
    layer.key_weights[...] = 3 * jax.random.normal(keys[1], (12,))
    x = jax.random.normal(keys[2], (2, 9, 12))
    first, second = layer.importance(x)
    at, of = np.mgrid[:9, :9]
    for weights in (first, second):
        assert weights.shape == (2, 9, 9, 3)
        np.testing.assert_allclose(weights.sum(2), 1, atol=1e-12)
        visible = (of <= at) & (at - of < (window or 9))
        assert np.all((np.asarray(weights) > 0) == visible[None, :, :, None])

    def averaged(weights: jax.Array, x: jax.Array) -> jax.Array:
        heads = x.reshape(2, 9, 3, 4)
        return jnp.einsum("btsn,bsnd->btnd", weights, heads).reshape(x.shape)

    mixed = layer.project(averaged(first, layer.query(x))) * layer.key(x)
    y = mixed + averaged(second, layer.norm(x + mixed)) * layer.value(x)
    np.testing.assert_allclose(layer(x), y, atol=1e-12)


def test_initial_importance_is_uniform():
    layer = attention.build("additive", model_dim=12, num_heads=3, rngs=nnx.Rngs(0))
    assert isinstance(layer, AdditiveAttention)
    first, second = layer.importance(jnp.ones((5, 12)))
    expected = np.tril(np.ones((5, 5))) / np.arange(1, 6)[:, None]
    for weights in (first, second):
        np.testing.assert_allclose(weights[..., 0], expected, atol=1e-6)
