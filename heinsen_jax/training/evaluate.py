"""Evaluation: loss, perplexity, accuracy and bits per byte on the validation split."""

import math
from collections.abc import Callable

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from heinsen_jax.data import Batch, Dataset, validation_batches
from heinsen_jax.data.dataset import Settings
from heinsen_jax.errors import UserError
from heinsen_jax.sharding import shard_batch, share_of_process
from heinsen_jax.training.positions import Measured, bucket_ends


def evaluate(
    step: Callable[[nnx.State, Batch, int], Measured],
    parameters: nnx.State,
    dataset: Dataset[Settings],
    config: Settings,
    mesh: Mesh,
    *,
    max_batches: int | None = None,
    is_causal: bool = True,
    step_by_position: Callable[[nnx.State, Batch, int], Measured] | None = None,
) -> dict[str, float]:
    """Predict each validation token once, from up to sequence_length previous tokens. A
    bidirectional model predicts a part of the tokens of each window from the others.

    Returns:
      `loss` in nats per token, `perplexity` = exp(loss), `accuracy` of the most likely token, and
      for causal models of text `bits_per_byte`; `loss_<length>` and `accuracy_<length>` for each
      of the data's `test_lengths`, or `accuracy_<name>` for other tests of a task; with
      `step_by_position`, which measures the longest rows, `loss_<length>_at_<end>` for each of
      their `bucket_ends` with a prediction.
    """
    metrics: dict[str, float] = {}
    by_position: dict[str, float] = {}
    process_index, process_count = share_of_process(mesh)
    lengths: dict[str, int] = {}
    rows_by_name = dataset.validation_rows(config)
    if step_by_position is not None:
        lengths = {name: rows[0].loss_mask.shape[-1] for name, rows in rows_by_name.items()}
    longest = max(lengths, key=lambda name: lengths[name], default=None)
    for name in rows_by_name:
        batches = validation_batches(
            dataset,
            config,
            name=name,
            max_batches=max_batches,
            process_index=process_index,
            process_count=process_count,
        )
        measure = step_by_position if step_by_position and name == longest else step
        sums = [np.zeros(())] * 3
        for index, batch in enumerate(batches):
            measured = measure(parameters, shard_batch(batch, mesh), index)
            sums = [old + np.asarray(new) for old, new in zip(sums, measured, strict=True)]
        total, correct, count = (float(x.sum()) for x in sums)
        if not count:
            raise UserError(
                "validation text: no token was masked, since it is too short; give more text"
            )
        if name == longest:
            length = lengths[name]
            for end, of_bucket, number in zip(bucket_ends(length), sums[0], sums[2], strict=True):
                if number:
                    by_position[f"loss_{length}_at_{end}"] = float(of_bucket / number)
        loss, accuracy = total / count, correct / count
        if name:
            metrics |= {f"loss_{name}": loss, f"accuracy_{name}": accuracy}
            continue
        metrics |= {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "accuracy": accuracy}
        if is_causal and dataset.bytes_per_token is not None:
            metrics["bits_per_byte"] = loss / math.log(2) / dataset.bytes_per_token
    return metrics | by_position
