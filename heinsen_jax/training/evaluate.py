"""Loss, perplexity and bits per byte over a validation text."""

import math
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from heinsen_jax.data import DataConfig, TokenDataset, validation_batches
from heinsen_jax.errors import UserError
from heinsen_jax.sharding import shard_batch, share_of_process


def evaluate(
    step: Callable,
    parameters: Any,
    dataset: TokenDataset,
    config: DataConfig,
    mesh: Mesh,
    *,
    max_batches: int | None = None,
    is_causal: bool = True,
) -> dict[str, float]:
    """Each validation token predicted once, from up to sequence_length tokens before it. Or if the
    model is not causal, some tokens of each such window, from the others.

    Returns:
      `loss` in nats per token, `perplexity` = exp(loss), and of a causal model `bits_per_byte` of
      the text.
    """
    total, count = 0.0, 0
    process_index, process_count = share_of_process(mesh)
    batches = validation_batches(
        dataset,
        config,
        max_batches=max_batches,
        process_index=process_index,
        process_count=process_count,
    )
    for index, batch in enumerate(batches):
        tokens, mask = shard_batch(batch.tokens, mesh), shard_batch(batch.mask, mesh)
        losses, counted = step(parameters, tokens, mask, index)
        total += float(losses)
        count += int(counted)
    if not count:
        raise UserError("validation text: none of its few tokens was masked; give more text")
    loss = total / count
    metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700.0))}
    if is_causal:
        split = dataset.manifest.splits["validation"]
        metrics["bits_per_byte"] = loss / math.log(2) * split.tokens / split.bytes
    return metrics
