"""Updates that would do harm are skipped, and counted."""

from __future__ import annotations

import math

import jax.numpy as jnp
import optax

from heinsen_jax.typing import Array, Bool, Float, Integer, PyTree, pytree_dataclass

MEMORY = 100  # updates that the usual norm is an average of, about


@pytree_dataclass
class Guard:
    """What has been skipped so far.

    Attributes:
      skipped: updates skipped in all.
      in_a_row: those skipped since the last one made.
      usual_norm: a running mean of gradients' norms; 0 before the first.
    """

    skipped: Integer[Array, ""]
    in_a_row: Integer[Array, ""]
    usual_norm: Float[Array, ""]

    @classmethod
    def first(cls) -> Guard:
        count = jnp.zeros((), jnp.int32)
        return cls(count, count, jnp.zeros((), jnp.float32))

    def check_update(
        self,
        loss: Float[Array, ""],
        gradients: PyTree[Array],
        updates: PyTree[Array],
        skip_grad_norm_ratio: float | None,
    ) -> tuple[Bool[Array, ""], Guard]:
        """Whether an update may be made, and the guard after it.

        It may if loss, gradients and what is added to parameters are finite, and the gradients'
        norm is at most `skip_grad_norm_ratio` times the usual one.
        """
        norm = optax.tree.norm(gradients).astype(jnp.float32)
        limit = math.inf if skip_grad_norm_ratio is None else skip_grad_norm_ratio
        is_usual = (self.usual_norm == 0) | (norm <= limit * self.usual_norm)
        is_good = jnp.isfinite(loss) & jnp.isfinite(norm) & is_usual
        is_good = is_good & jnp.isfinite(optax.tree.norm(updates))
        share = jnp.where(self.usual_norm == 0, 1.0, 1 / MEMORY)
        moved = self.usual_norm + share * (norm - self.usual_norm)
        return is_good, Guard(
            self.skipped + ~is_good,
            jnp.where(is_good, 0, self.in_a_row + 1),
            jnp.where(is_good, moved, self.usual_norm),
        )
