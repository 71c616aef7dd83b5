"""Evaluation: loss, perplexity, accuracy and bits per byte on held-out text."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from heinsen_jax.data import Batch, Dataset
from heinsen_jax.data.dataset import MixedRows, Settings
from heinsen_jax.data.pipeline import row_batches
from heinsen_jax.data.sources import HeldOut
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModel
from heinsen_jax.objectives.loss_by_position import Measured, bucket_ends, bucket_sums
from heinsen_jax.objectives.objective import Objective, next_token, objective_of
from heinsen_jax.sharding import MeshConfig, make_mesh, shard_batch, share_of_process
from heinsen_jax.typing import Array, Integer


def evaluate(
    step: Callable[[nnx.State, Batch, int], Measured],
    parameters: nnx.State,
    dataset: Dataset[Settings],
    config: Settings,
    mesh: Mesh,
    *,
    split: HeldOut = "validation",
    max_batches: int | None = None,
    is_causal: bool = True,
    step_by_position: Callable[[nnx.State, Batch, int], Measured] | None = None,
    before_batch: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Predict each token of a held-out split once, from up to sequence_length previous tokens. A
    bidirectional model predicts a part of the tokens of each window from the others.
    `before_batch`, called before each batch, may raise an exception to interrupt this.

    Returns:
      `loss` in nats per token, `perplexity` = exp(loss), `accuracy` of the most likely token, and
      for causal models of text `bits_per_byte`; `loss_<length>` and `accuracy_<length>` for each
      of the data's `test_lengths`, or `accuracy_<name>` for other tests of a task; with
      `step_by_position`, which measures the longest rows, `loss_<length>_at_<end>` for each of
      their `bucket_ends` with a prediction. For a mixture, losses and accuracies are means of the
      sources' by the mixture's weights, whatever the sizes of their validation splits, `perplexity`
      and `bits_per_byte` follow from the mean loss, and each source has `loss_<source>` and
      `accuracy_<source>`.
    """
    metrics: dict[str, float] = {}
    by_position: dict[str, float] = {}
    process_index, process_count = share_of_process(mesh)
    rows_by_name = dataset.held_out_rows(config, split)
    lengths = {name: rows[0].loss_mask.shape[-1] for name, rows in rows_by_name.items()}
    longest = max(lengths, key=lambda name: lengths[name])
    measured: dict[int, _Means] = {}  # by rows, which a mixture shares with its sources

    def means(rows: Sequence[Batch], name: str) -> _Means:
        if isinstance(rows, MixedRows):
            chosen = {source: weight for source, weight in rows.weights.items() if weight}
            sources = [means(rows.sources[source], name) for source in chosen]
            return _weighted_means(sources, [*chosen.values()])
        if id(rows) not in measured:
            batches = row_batches(
                rows,
                config,
                max_batches=max_batches,
                process_index=process_index,
                process_count=process_count,
            )
            measure = step_by_position if step_by_position and name == longest else step
            sums = [np.zeros(())] * 3
            for index, batch in enumerate(batches):
                before_batch()
                added = measure(parameters, shard_batch(batch, mesh), index)
                added = [np.asarray(new, np.float64) for new in added]
                sums = [old + new for old, new in zip(sums, added, strict=True)]
            measured[id(rows)] = _means(sums, lengths[name])
        return measured[id(rows)]

    for name, rows in rows_by_name.items():
        average = means(rows, name)
        if step_by_position is not None and name == longest:
            for end, loss in average.by_end.items():
                by_position[f"loss_{lengths[name]}_at_{end}"] = loss
        if name:
            metrics |= {f"loss_{name}": average.loss, f"accuracy_{name}": average.accuracy}
            continue
        perplexity = math.exp(min(average.loss, 700.0))
        metrics |= {"loss": average.loss, "perplexity": perplexity, "accuracy": average.accuracy}
        if is_causal and (size := dataset.bytes_per_token(config, split)) is not None:
            metrics["bits_per_byte"] = average.loss / math.log(2) / size
    return metrics | by_position


def in_microbatches(
    rows: int, max_batches: int | None, accumulation_steps: int, *, is_causal: bool
) -> tuple[int, int | None]:
    """Rows of a batch, and number of batches, with which an evaluation has the same text in batches
    as large as a microbatch of training, and fits into its memory. Batches of masked models stay
    whole, since their masks depend on the batch."""
    parts = accumulation_steps if is_causal else 1
    return rows // parts, None if max_batches is None else max_batches * parts


def evaluate_model(
    model: LanguageModel,
    dataset: Dataset[Settings],
    config: Settings,
    *,
    masked_fraction: float,
    split: HeldOut = "validation",
    loss_by_position: bool = False,
    max_batches: int | None = None,
) -> dict[str, float]:
    """`evaluate` a model on one device of this process."""
    graph, parameters = nnx.split(model)
    objective = objective_of(model.config, masked_fraction, dataset.vocab_size)
    mesh = make_mesh(MeshConfig(), jax.local_devices()[:1])
    make_step = partial(make_evaluation_step, graph, objective)
    with jax.set_mesh(mesh):
        return evaluate(
            make_step(),
            parameters,
            dataset,
            config,
            mesh,
            split=split,
            max_batches=max_batches,
            is_causal=model.config.is_causal,
            step_by_position=make_step(by_position=True) if loss_by_position else None,
        )


def make_evaluation_step(
    graph: nnx.GraphDef[LanguageModel],
    objective: Objective = next_token,
    *,
    by_position: bool = False,
) -> Callable[[nnx.State, Batch, int], Measured]:
    """Return the jitted evaluation, (parameters, batch, index) -> (sum of losses, number of correct
    predictions, number of predictions), for each bucket of positions if `by_position`."""

    @jax.jit
    def evaluation_step(parameters: nnx.State, batch: Batch, index: Integer[Array, ""]) -> Measured:
        key = jax.random.key(index)
        model = nnx.merge(graph, parameters)
        predictions = objective(model, batch, key)
        if by_position:
            return bucket_sums(predictions, jax.tree.map(jnp.asarray, batch.segment_ids))
        return *predictions.sums(), jnp.sum(predictions.loss_mask)

    return evaluation_step


@dataclass(frozen=True)
class _Means:
    """Mean loss, accuracy, and the mean loss of each bucket of positions, by its end."""

    loss: float
    accuracy: float
    by_end: dict[int, float]


def _means(sums: Sequence[np.ndarray], length: int) -> _Means:
    """The means of the sums that a step returns, added over batches."""
    total, correct, count = (float(x.sum()) for x in sums)
    if not count:
        raise UserError("held-out text: no token was masked, since it is too short; give more text")
    by_end = {}
    if sums[0].ndim:
        buckets = zip(bucket_ends(length), sums[0], sums[2], strict=True)
        by_end = {end: float(loss / number) for end, loss, number in buckets if number}
    return _Means(total / count, correct / count, by_end)


def _weighted_means(sources: Sequence[_Means], weights: Sequence[float]) -> _Means:
    """The means over sources; for a bucket, over the sources with predictions in it."""
    pairs = [*zip(weights, sources, strict=True)]
    by_end = {
        end: _weighted([(w, x.by_end[end]) for w, x in pairs if end in x.by_end])
        for end in sorted({end for source in sources for end in source.by_end})
    }
    loss = _weighted([(w, x.loss) for w, x in pairs])
    return _Means(loss, _weighted([(w, x.accuracy) for w, x in pairs]), by_end)


def _weighted(pairs: Sequence[tuple[float, float]]) -> float:
    """The mean of numbers with weights."""
    return sum(w * x for w, x in pairs) / sum(w for w, _ in pairs)
