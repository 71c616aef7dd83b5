"""The arrays of one call, and the chunks that they are cut into."""

from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from heinsen_jax.typing import Array

Tree = TypeVar("Tree")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """What is attended over: tokens on axis 1 of every array.

    Attributes:
      query: `[B, T, G, R, K]`.
      key: `[B, T, G, K]`; -inf is a token unseen.
      value: `[B, T, G, V]`: log-values, or values of either sign.
      log_decay: `[B, T, G, K]` or `[B, T, G, 1]`: log of what a token multiplies the state before
        it by.
      starts: `[B, T]`: whether a token begins a document, and sees nothing before itself.
    """

    query: Array
    key: Array
    value: Array
    log_decay: Array | None = None
    starts: Array | None = None

    @property
    def length(self) -> int:
        return self.key.shape[1]

    @property
    def decay_and_starts(self) -> Array | None:
        """`log_decay` with -inf where a document starts; None if there is neither."""
        if self.starts is None:
            return self.log_decay
        decay = jnp.zeros_like(self.key[..., :1]) if self.log_decay is None else self.log_decay
        return jnp.where(self.starts[..., None, None], -jnp.inf, decay)

    def documents(self, size: int) -> Array:
        """How many documents have begun in a token's chunk, up to it: `[J, X, C]`."""
        assert self.starts is not None
        starts = jnp.broadcast_to(self.starts[..., None, None], (*self.key.shape[:3], 1))
        return jnp.cumsum(chunked(starts, size)[..., 0], -1)


def chunked(x: Array, size: int) -> Array:
    """`[B, J C, G, (R,) F]` -> `[J, X, R C, F]`, X = B G: contractions are batched products."""
    if x.ndim == 4:
        x = x[:, :, :, None]
    batch, length, groups, heads, features = x.shape
    x = x.reshape(batch, length // size, size, groups, heads, features)
    x = jnp.transpose(x, (1, 0, 3, 4, 2, 5))
    return x.reshape(length // size, batch * groups, heads * size, features)


def unchunked(x: Array, batch: int, heads: int) -> Array:
    """The inverse: `[J, X, R C, F]` -> `[B, J C, G, R, F]`."""
    chunks, folds, rows, features = x.shape
    x = x.reshape(chunks, batch, folds // batch, heads, rows // heads, features)
    x = jnp.transpose(x, (1, 0, 4, 2, 3, 5))
    return x.reshape(batch, chunks * rows // heads, folds // batch, heads, features)


def each_head(x: Array, heads: int) -> Array:
    """`[..., C, F]` repeated for the rows of every head: `[..., R C, F]`."""
    return x if heads == 1 else jnp.concatenate([x] * heads, -2)


def fold(state: Tree) -> Tree:
    """`[B, G, ...]` -> `[X, ...]`"""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state)


def unfold(state: Tree, tokens: Tokens) -> Tree:
    """`[X, ...]` -> `[B, G, ...]`"""
    batch, _, groups, _ = tokens.key.shape
    return jax.tree.map(lambda x: x.reshape(batch, groups, *x.shape[1:]), state)


def varying_like(tree: Tree, example: Any) -> Tree:
    """The same arrays, but differing between the devices of an enclosing `jax.shard_map` where any
    array of `example` does: loops and branches ask for equal types, of which that is a part."""
    never = jnp.zeros((), bool)
    for x in jax.tree.leaves(example):
        never |= jnp.any(x[:0] != 0)  # of nothing, hence false, but a result of x all the same
    return jax.tree.map(lambda x: jnp.where(never, jnp.zeros_like(x), x), tree)
