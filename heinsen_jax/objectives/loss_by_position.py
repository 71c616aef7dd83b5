"""Losses by position in the context, in buckets whose size doubles."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.objectives.cross_entropy import token_losses
from heinsen_jax.objectives.objective import Predictions
from heinsen_jax.sharding import constrain
from heinsen_jax.typing import Array, Float, Integer

FIRST_END = 16

Measured: TypeAlias = tuple[
    Float[Array, "*buckets"], Integer[Array, "*buckets"], Integer[Array, "*buckets"]
]
"""Sum of the losses, number of correct predictions, and number of predictions: in all, or for each
bucket."""


def bucket_ends(length: int) -> tuple[int, ...]:
    """Ends of the buckets of positions in a sequence: 16, 32, 64, ..., `length`. The first bucket
    begins at position 0, every other one where the previous one ends.

    Examples:
      >>> bucket_ends(100)
      (16, 32, 64, 100)
    """
    ends = [FIRST_END]
    while ends[-1] < length:
        ends.append(2 * ends[-1])
    return (*ends[:-1], length)


def bucket_sums(predictions: Predictions, segment_ids: Integer[Array, "B L"] | None) -> Measured:
    """Sums over the predictions of each bucket of `bucket_ends`.

    The position of a prediction is the number of tokens that precede its input token in the row or,
    with `segment_ids`, in its segment.
    """
    shape = predictions.targets.shape
    place = jnp.broadcast_to(jnp.arange(shape[1]), shape)
    if segment_ids is not None:
        given = segment_ids[:, :-1]
        is_first = jnp.pad(given[:, 1:] != given[:, :-1], ((0, 0), (1, 0)))
        place = place - lax.cummax(jnp.where(is_first, place, 0), axis=1)
    ends = jnp.asarray(bucket_ends(shape[1]))
    bucket = jnp.searchsorted(ends, place, side="right")
    counted = jax.nn.one_hot(bucket, len(ends), dtype=bool) & predictions.loss_mask[..., None]
    with jax.named_scope("logits"):
        losses, correct = token_losses(
            predictions.readout, predictions.features, predictions.targets
        )
    sums = (
        jnp.sum(jnp.where(counted, losses[..., None], 0), (0, 1)),
        jnp.sum(counted & correct[..., None], (0, 1)),
        jnp.sum(counted, (0, 1)),
    )
    total, right, count = (constrain(x, None) for x in sums)  # whole on all devices
    return total, right, count
