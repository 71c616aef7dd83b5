"""The map from features to logits."""

from dataclasses import field

import jax
import jax.numpy as jnp

from heinsen_jax.sharding import constrain
from heinsen_jax.typing import Array, DTypeLike, Features, Float, pytree_dataclass, wide


@pytree_dataclass
class Readout:
    """logits = cap((features E^T + b) * scale), with cap(x) = c tanh(x / c), or x without c.

    Attributes:
      embedding: E `[vocab_size, D]`.
      bias: b `[vocab_size]`, or None.
      scale: a number.
      soft_cap: c, or None.
      dtype: dtype of the factors of the product; its sums have the dtype of E, at least float32.
    """

    embedding: Float[Array, "vocab_size D"]
    bias: Float[Array, "vocab_size"] | None = None
    scale: float = field(default=1.0, metadata={"static": True})
    dtype: DTypeLike = field(default="float32", metadata={"static": True})
    soft_cap: float | None = field(default=None, metadata={"static": True})

    def __call__(self, features: Features) -> Float[Array, "*B T vocab_size"]:
        """Logits `[*B, T, vocab_size]` of features `[*B, T, D]`."""
        features = features.astype(self.dtype)
        is_one_type = features.dtype == self.embedding.dtype == wide(self.embedding.dtype)
        logits = (_product if is_one_type else _mixed_product)(features, self.embedding)
        if self.bias is not None:
            logits = logits + jnp.broadcast_to(self.bias, logits.shape)
        logits = logits if self.scale == 1 else logits * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * jnp.tanh(logits / self.soft_cap)
        return constrain(logits, "tokens", "vocab")


def _product(features: Array, embedding: Array) -> Array:
    factors = features, embedding.astype(features.dtype)
    return jnp.einsum("...d,vd->...v", *factors, preferred_element_type=wide(embedding.dtype))


@jax.custom_vjp
def _mixed_product(features: Array, embedding: Array) -> Array:
    """The matrix product, with factors in the dtype of the features in the backward pass, too:
    JAX would use float32 products for the cotangents of float32 sums, at half the rate or less."""
    return _product(features, embedding)


def _forward(features, embedding):
    return _product(features, embedding), (features, embedding)


def _backward(saved, cotangent):
    features, embedding = saved
    factors = cotangent.astype(features.dtype), embedding.astype(features.dtype)
    d_features = jnp.einsum("...v,vd->...d", *factors, preferred_element_type=wide(embedding.dtype))
    factors = factors[0], features
    d_embedding = jnp.einsum(
        "...v,...d->vd", *factors, preferred_element_type=wide(embedding.dtype)
    )
    return d_features.astype(features.dtype), d_embedding.astype(embedding.dtype)


_mixed_product.defvjp(_forward, _backward)
