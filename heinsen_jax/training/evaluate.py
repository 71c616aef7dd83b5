"""Loss, perplexity and bits per byte over a validation text."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from heinsen_jax.data import DataConfig, TokenDataset, validation_batches
from heinsen_jax.sharding import shard_batch


def evaluate(
    step: Callable,
    parameters: Any,
    dataset: TokenDataset,
    config: DataConfig,
    mesh: Mesh,
    *,
    max_batches: int | None = None,
) -> dict[str, float]:
    """Each validation token predicted once, from up to sequence_length tokens before it.

    Returns:
      `loss` in nats per token, `perplexity` = exp(loss), and `bits_per_byte` of the text.
    """
    total, count = 0.0, 0
    batches = validation_batches(
        dataset,
        config,
        max_batches=max_batches,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    for batch in batches:
        tokens, mask = shard_batch(batch.tokens, mesh), shard_batch(batch.mask, mesh)
        total += float(step(parameters, tokens, mask))
        count += int(np.sum(batch.mask)) if jax.process_count() == 1 else int(jax.numpy.sum(mask))
    loss = total / count
    split = dataset.manifest.splits["validation"]
    return {
        "loss": loss,
        "perplexity": math.exp(min(loss, 700.0)),
        "bits_per_byte": loss / math.log(2) * split.tokens / split.bytes,
    }
