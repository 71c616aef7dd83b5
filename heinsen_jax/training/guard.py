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
      mean_grad_norm: running mean of gradient norms, each at most the largest allowed then; 0
        before the first update.
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
        the gradients is at most `skip_grad_norm_ratio` times its running mean. Finite updates that
        are skipped raise the mean too, by as much as the largest allowed norm would: gradients that
        stay large do not come from a bad batch, and training continues after some skipped updates.
        """
        norm, mean = optax.tree.norm(gradients).astype(jnp.float32), self.mean_grad_norm
        ratio = math.inf if skip_grad_norm_ratio is None else skip_grad_norm_ratio
        limit = jnp.where(mean == 0, jnp.inf, ratio * mean)
        is_finite = jnp.isfinite(loss) & jnp.isfinite(norm)
        is_finite = is_finite & jnp.isfinite(optax.tree.norm(updates))
        is_good = is_finite & (norm <= limit)
        share = jnp.where(mean == 0, 1.0, 1 / MEMORY)
        moved = mean + share * (jnp.minimum(norm, limit) - mean)
        return is_good, Guard(
            self.skipped + ~is_good,
            jnp.where(is_good, 0, self.consecutive_skips + 1),
            jnp.where(is_finite, moved, mean),
        )
