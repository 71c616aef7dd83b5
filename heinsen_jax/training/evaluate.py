"""Evaluation: loss, perplexity, accuracy and bits per byte on the validation split."""

import math
from collections.abc import Callable

from flax import nnx
from jax.sharding import Mesh

from heinsen_jax.data import Batch, Dataset, validation_batches
from heinsen_jax.data.dataset import Settings
from heinsen_jax.errors import UserError
from heinsen_jax.sharding import shard_batch, share_of_process
from heinsen_jax.training.step import Measured


def evaluate(
    step: Callable[[nnx.State, Batch, int], Measured],
    parameters: nnx.State,
    dataset: Dataset[Settings],
    config: Settings,
    mesh: Mesh,
    *,
    max_batches: int | None = None,
    is_causal: bool = True,
) -> dict[str, float]:
    """Predict each validation token once, from up to sequence_length previous tokens. A
    bidirectional model predicts a part of the tokens of each window from the others.

    Returns:
      `loss` in nats per token, `perplexity` = exp(loss), `accuracy` of the most likely token, and
      for causal models of text `bits_per_byte`; `loss_<length>` and `accuracy_<length>` for each
      of the data's `test_lengths`, or `accuracy_<name>` for other tests of a task.
    """
    metrics: dict[str, float] = {}
    process_index, process_count = share_of_process(mesh)
    for name in dataset.validation_rows(config):
        batches = validation_batches(
            dataset,
            config,
            name=name,
            max_batches=max_batches,
            process_index=process_index,
            process_count=process_count,
        )
        total, correct, count = 0.0, 0, 0
        for index, batch in enumerate(batches):
            measured = step(parameters, shard_batch(batch, mesh), index)
            total, correct, count = (
                old + new.item() for old, new in zip((total, correct, count), measured, strict=True)
            )
        if not count:
            raise UserError(
                "validation text: no token was masked, since it is too short; give more text"
            )
        loss, accuracy = total / count, correct / count
        if name:
            metrics |= {f"loss_{name}": loss, f"accuracy_{name}": accuracy}
            continue
        metrics |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}
        if is_causal and dataset.bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / dataset.bytes_per_token
    return metrics
