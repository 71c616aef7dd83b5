"""The arrays of one call, and the chunks that they are cut into."""

from dataclasses import dataclass
from typing import TypeVar

import jax
import jax.numpy as jnp

from heinsen_jax.ops.layout import chunk as chunked  # noqa: F401
from heinsen_jax.ops.layout import repeat_rows as each_head  # noqa: F401
from heinsen_jax.ops.layout import unchunk as unchunked  # noqa: F401
from heinsen_jax.ops.layout import varying_like  # noqa: F401
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


def fold(state: Tree) -> Tree:
    """`[B, G, ...]` -> `[X, ...]`"""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), state)


def unfold(state: Tree, tokens: Tokens) -> Tree:
    """`[X, ...]` -> `[B, G, ...]`"""
    batch, _, groups, _ = tokens.key.shape
    return jax.tree.map(lambda x: x.reshape(batch, groups, *x.shape[1:]), state)
