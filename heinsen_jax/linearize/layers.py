"""Choice of the layers that stay as they are."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from heinsen_jax.data import Batch
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.models.blocks import Block
from heinsen_jax.objectives.cross_entropy import distilled_losses
from heinsen_jax.sharding import shard_batch
from heinsen_jax.training.layerwise import replaced_layers, through_layers
from heinsen_jax.training.program import Program
from heinsen_jax.typing import Array, Bool, Features, Float

AUTO = "auto:"
"""Prefix of the number of layers to choose."""
TOKENS = 2048
"""Maximum number of tokens on which layers are compared, up to one sequence."""


def number_of(keep: Sequence[str]) -> int | None:
    """N of auto:N; None for other values.

    Raises:
      UserError: auto is one of several values, or N is no positive number.
    """
    if not any(value.startswith(AUTO.rstrip(":")) for value in keep):
        return None
    number = keep[0].removeprefix(AUTO)
    if len(keep) > 1 or not number.isdecimal() or not int(number):
        raise UserError(
            f"--keep {' '.join(keep)}: give {AUTO}N alone, with the number N of layers to keep"
        )
    return int(number)


def kept_layers(model: LanguageModelConfig, teacher: LanguageModelConfig) -> list[int]:
    """The layers that a linearized model has in common with its teacher."""
    replaced = replaced_layers(model, teacher)
    return [i for i in range(model.num_layers) if not replaced[i % len(replaced)]]


def choose_layers(program: Program, number: int) -> list[int]:
    """The layers of the teacher to keep.

    They are the layers for which the divergence KL(teacher || model) of the predictions is smallest
    when the layer of the teacher alone is put back into the model, which has the weights with which
    training would begin.

    Args:
      program: program of the model with all layers replaced.
      number: number of layers.

    Returns:
      Their indices, in order.

    Raises:
      UserError: the model has no more than that many layers that are replaced.

    References:
      Li et al., 2025, Distilling to Hybrid Attention Models via KL-Guided Layer Selection,
      arXiv:2512.20569, who train each candidate shortly before it is scored.
    """
    assert program.distillation is not None
    teacher_config = program.distillation.teacher.config
    fixed = {*kept_layers(program.model, teacher_config)}
    candidates = [i for i in range(program.model.num_layers) if i not in fixed]
    if number >= len(candidates):
        raise UserError(
            f"--keep {AUTO}{number}: {len(candidates)} layers are replaced; keep fewer of them"
        )
    parameters = program.initial_state().parameters
    tokens = min(program.config.distillation.initialization_tokens, TOKENS)
    batch = shard_batch(next(program.batches(0, batch_size=program.rows_of(tokens))), program.mesh)
    model = nnx.merge(program.graph, parameters)
    teacher = nnx.merge(nnx.graphdef(program.distillation.teacher), *program.constants)
    masks = np.eye(program.model.num_layers, dtype=bool)[candidates]
    wanted = features_of(teacher, batch)
    measure = partial(_divergence, model, teacher, wanted, batch)
    divergences = [float(measure(jnp.asarray(mask))) for mask in masks]
    chosen = np.argsort(divergences, kind="stable")[:number]
    return sorted(candidates[i] for i in chosen)


@jax.jit
def features_of(model: LanguageModel, batch: Batch) -> Features:
    """The features of a model at the tokens of a batch, `[B, T, D]`."""
    return model.features(batch.tokens[:, :-1], segment_ids=batch.input_segments)[0]


@jax.jit
def _divergence(
    model: LanguageModel,
    teacher: LanguageModel,
    wanted: Features,
    batch: Batch,
    keep: Bool[Array, "layers"],
) -> Float[Array, ""]:
    """Mean divergence from the teacher, given its features, of a model with some of its layers."""
    segment_ids = jax.tree.map(jnp.asarray, batch.input_segments)
    tokens = jnp.asarray(batch.tokens)[:, :-1]

    def visit(
        ours: Block, theirs: Block, is_replaced: bool, x: Features, is_kept: Bool[Array, ""]
    ) -> tuple[Features, None]:
        def apply(block: Block, x: Features) -> Features:
            return block(x, state=None, return_state=False, segment_ids=segment_ids)[0]

        if not is_replaced:
            return apply(ours, x), None
        graphs, parameters = zip(*(nnx.split(block) for block in (ours, theirs)), strict=True)

        def branch(index: int) -> Features:
            return apply(nnx.merge(graphs[index], parameters[index]), x)

        return lax.cond(is_kept, lambda: branch(1), lambda: branch(0)), None

    x, _ = model.embedded(tokens, segment_ids)
    x, _ = through_layers(model, teacher, visit, x, keep)
    losses = distilled_losses(
        *(model.readout, model.normed(x), teacher.readout, wanted, jnp.asarray(batch.targets)),
        divergence_weight=1.0,
    )
    return jnp.sum(losses * batch.loss_mask) / jnp.sum(batch.loss_mask)
