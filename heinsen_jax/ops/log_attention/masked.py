"""Log-attention under an arbitrary mask, in quadratic time, since a state cannot mask single
tokens."""

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.numerics import log_scores, matmul, softmax
from heinsen_jax.typing import Array, Bool, Float, typed

SMALL = 2**22  # number of terms Q_tk + K_sk up to which storing them all is fastest
FEWEST = 16  # queries computed at a time, if not all


@jax.jit  # so that equal calls outside another `jit` are compiled once
@typed
def masked_attention(
    query: Float[Array, "*B T N K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S G V"],
    mask: Bool[Array, "*B M T S"],
) -> Float[Array, "*B T N V"]:
    """`heinsen_attention` under a mask of the tokens that each query attends to.

        Y_t = sum_s P_ts V_s,    P_ts = softmax_s(LSE_K(Q_t + K_s))           (1)

    over all s where the mask is True; 0 with zero gradients if it is nowhere True. Exact for any
    queries and keys; their gradients overflow where values times cotangents exceed 1e19. Fully
    masked tokens, NaN included, have no effect. The arrays are at least float32. Supports
    reverse-mode derivatives only.

    Queries are computed in chunks, and recomputed in the backward pass: temporary memory does not
    exceed the size of all scores LSE_K(Q_t + K_s).

    Args:
      query, key, value: as in `heinsen_attention`.
      mask: True for visible tokens, for each of M = N heads, or for all of them with M = 1.
    """
    *batch, length, num_heads, depth = query.shape
    sources, groups, value_depth = value.shape[-3:]
    heads = num_heads // groups
    if 0 in (*query.shape, *value.shape):
        return jnp.zeros((*query.shape[:-1], value_depth), value.dtype)
    mask = lax.optimization_barrier(mask)  # XLA would fold a constant one for seconds
    mask = mask.reshape(-1, *((groups, heads) if mask.shape[-3] > 1 else (1, 1)), length, sources)
    visible = jnp.any(mask, (2, 3))  # [B, G or 1, S]
    key = jnp.moveaxis(key.reshape(-1, sources, groups, depth), 1, 2)
    key = jnp.where(visible[..., None], key, -jnp.inf)
    value = jnp.moveaxis(value.reshape(-1, sources, groups, value_depth), 1, 2)
    value = jnp.where(visible[..., None], value, 0)
    query = jnp.moveaxis(query.reshape(-1, length, groups, heads, depth), 1, 3)

    is_small = query.size * sources <= SMALL
    # As many queries as have no more terms than all scores.
    size = length if is_small else min(length, max(FEWEST, -(-length // depth)))
    attend = jax.checkpoint(lambda block: _attend(block[0], block[1], key, value))
    y = lax.map(attend, (_blocks(query, size), _blocks(mask, size)))  # [J, B, G, R, C, V]
    y = jnp.moveaxis(y, (0, 4), (1, 2)).reshape(-1, len(y) * size, num_heads, value_depth)
    return y[:, :length].reshape(*batch, length, num_heads, value_depth)


def _attend(
    query: Float[Array, "B G R C K"],
    mask: Bool[Array, "B g r C S"],
    key: Float[Array, "B G S K"],
    value: Float[Array, "B G S V"],
) -> Float[Array, "B G R C V"]:
    attends = jnp.any(mask, -1, keepdims=True)
    query = jnp.where(attends | jnp.isfinite(query), query, 0)  # NaN times a cotangent of 0 is NaN
    *folds, heads, size, _ = query.shape
    scores = log_scores(query.reshape(*folds, heads * size, -1), key)
    scores = jnp.where(mask, scores.reshape(*folds, heads, size, -1), -jnp.inf)
    (weights,) = softmax((scores,), -1).weights
    y = matmul(weights.reshape(*folds, heads * size, -1), value)
    return y.reshape(*folds, heads, size, -1)


def _blocks(x: Array, size: int) -> Array:
    """`[..., T, F]` -> `[J, ..., C, F]`, padded with zeros at the end."""
    *axes, length, features = x.shape
    x = jnp.pad(x, [(0, 0)] * len(axes) + [(0, -length % size), (0, 0)])
    return jnp.moveaxis(x.reshape(*axes, -1, size, features), -3, 0)
