"""Harmful updates are skipped and counted."""

from __future__ import annotations

import math

import jax.numpy as jnp
import optax

from heinsen_jax.typing import Array, Bool, Float, Integer, PyTree, pytree_dataclass

MEMORY = 100  # time constant of the running mean of gradient norms, in updates


@pytree_dataclass
class Guard:
    """Record of skipped updates.

    Attributes:
      skipped: total number of skipped updates.
      consecutive_skips: number of consecutive skipped updates.
      mean_grad_norm: running mean of gradient norms; 0 before the first update.
    """

    skipped: Integer[Array, ""]
    consecutive_skips: Integer[Array, ""]
    mean_grad_norm: Float[Array, ""]

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
        """Decide whether to apply an update; return the decision and the guard after it.

        An update is applied if the loss, the gradients and the updates are finite, and the norm of
        the gradients is at most `skip_grad_norm_ratio` times its running mean.
        """
        norm = optax.tree.norm(gradients).astype(jnp.float32)
        limit = math.inf if skip_grad_norm_ratio is None else skip_grad_norm_ratio
        is_usual = (self.mean_grad_norm == 0) | (norm <= limit * self.mean_grad_norm)
        is_good = jnp.isfinite(loss) & jnp.isfinite(norm) & is_usual
        is_good = is_good & jnp.isfinite(optax.tree.norm(updates))
        share = jnp.where(self.mean_grad_norm == 0, 1.0, 1 / MEMORY)
        moved = self.mean_grad_norm + share * (norm - self.mean_grad_norm)
        return is_good, Guard(
            self.skipped + ~is_good,
            jnp.where(is_good, 0, self.consecutive_skips + 1),
            jnp.where(is_good, moved, self.mean_grad_norm),
        )
