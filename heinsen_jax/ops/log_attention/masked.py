"""Attention under any mask: in quadratic time, since a state does not tell tokens apart."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.numerics import matmul, reciprocal, scaled_scores, share
from heinsen_jax.typing import Array, Bool, Float, typed

SMALL = 2**22  # terms Q_tk + K_sk that are best held all at once
FEWEST = 16  # queries computed at a time, where these are not all


@partial(jax.jit, inline=True)  # outside another `jit`, so that calls alike are compiled once
@typed
def masked_attention(
    query: Float[Array, "*B T N K"],
    key: Float[Array, "*B S G K"],
    value: Float[Array, "*B S G V"],
    mask: Bool[Array, "*B M T S"],
) -> Float[Array, "*B T N V"]:
    """`heinsen_attention` under a mask of the tokens that each query attends to.

        Y_t = sum_s P_ts V_s,    P_ts = softmax_s(LSE_K(Q_t + K_s))           (1)

    over all s where the mask is True; 0, with gradients of 0, where it is nowhere True. Exact for
    any queries and keys; gradients of these overflow where values times cotangents exceed 1e19.
    Tokens that no query attends to, NaN included, change nothing. The dtype is that of the arrays,
    float32 at least. Has reverse-mode derivatives only.

    Some queries are computed at a time, and again in backward: what is held is no more than the
    scores LSE_K(Q_t + K_s) of all would be.

    Args:
      query, key, value: as in `heinsen_attention`.
      mask: for each of the N heads or, M being 1, for all of them.
    """
    *batch, length, num_heads, depth = query.shape
    sources, groups, value_depth = value.shape[-3:]
    heads = num_heads // groups
    if 0 in (*query.shape, *value.shape):
        return jnp.zeros((*query.shape[:-1], value_depth), value.dtype)
    mask = lax.optimization_barrier(mask)  # a constant one would keep XLA's compiler busy
    mask = mask.reshape(-1, *((groups, heads) if mask.shape[-3] > 1 else (1, 1)), length, sources)
    visible = jnp.any(mask, (2, 3))  # [B, G or 1, S]
    key = jnp.moveaxis(key.reshape(-1, sources, groups, depth), 1, 2)
    key = jnp.where(visible[..., None], key, -jnp.inf)
    value = jnp.moveaxis(value.reshape(-1, sources, groups, value_depth), 1, 2)
    value = jnp.where(visible[..., None], value, 0)
    query = jnp.moveaxis(query.reshape(-1, length, groups, heads, depth), 1, 3)

    is_small = query.size * sources <= SMALL
    # So many that their terms, where these are formed, are no more than all scores.
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
    scores = scaled_scores(query.reshape(*folds, heads * size, -1), key)
    full = *folds, heads, size, key.shape[-2]
    exponent = jnp.where(mask, scores.exponent.reshape(full), -jnp.inf)
    weights = scores.factor.reshape(full) * share(exponent, jnp.max(exponent, -1, keepdims=True))
    weights = weights * reciprocal(jnp.sum(weights, -1, keepdims=True))
    y = matmul(weights.reshape(*folds, heads * size, -1), value)
    return y.reshape(*folds, heads, size, -1)


def _blocks(x: Array, size: int) -> Array:
    """`[..., T, F]` -> `[J, ..., C, F]`, with zeros at the end."""
    *axes, length, features = x.shape
    x = jnp.pad(x, [(0, 0)] * len(axes) + [(0, -length % size), (0, 0)])
    return jnp.moveaxis(x.reshape(*axes, -1, size, features), -3, 0)
