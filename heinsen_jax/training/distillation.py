"""Distillation: training of a model to imitate a teacher, from the teacher's weights."""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import Mesh

from heinsen_jax.data import Batch
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.models.blocks import Block
from heinsen_jax.models.conversion import new_parameters, shared_weights
from heinsen_jax.objectives.cross_entropy import distilled_losses
from heinsen_jax.objectives.objective import RandomKey
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.load import Precision, load_architecture, load_run
from heinsen_jax.sharding import put, shardings
from heinsen_jax.storage.files import storage_errors, write_atomically
from heinsen_jax.training.config import DistillationConfig
from heinsen_jax.training.layerwise import replaced_layers, through_layers
from heinsen_jax.typing import Array, Bool, Features, Float, Integer, PyTree

TEACHER_FILE = "teacher.sha256"
"""Hash of the weights of the teacher of a run."""


def check_teacher(config: DistillationConfig, model: LanguageModelConfig) -> None:
    """Check the settings of a distillation into a model, without loading weights.

    Raises:
      UserError: a setting has no effect without a teacher; the model is not causal; the teacher has
        no run; or the model and the teacher differ in more than attention layers.
    """
    if config.teacher is None:
        for field in dataclasses.fields(config):
            if getattr(config, field.name) != field.default:
                raise UserError(
                    f"distillation.{field.name} has no effect without a teacher; set "
                    "distillation.teacher to a run"
                )
        return
    if not model.is_causal:
        raise UserError(
            "model.is_causal=False: distillation is for causal models; set it to True, or leave "
            "distillation.teacher out"
        )
    if config.start is not None and config.initialization_tokens:
        raise UserError(
            f"distillation.initialization_tokens={config.initialization_tokens} with "
            f"distillation.start={config.start}: weights that are trained already are not fitted; "
            "leave one of them out"
        )
    new_parameters(model, load_architecture(config.teacher))


def hash_of_weights(model: LanguageModel) -> str:
    """SHA-256 of the parameters of a model on the host, with their names, shapes and dtypes."""
    digest = hashlib.sha256()
    for name, value in flatten_with_names(nnx.state(model, nnx.Param)).items():
        digest.update(f"{name} {value.shape} {value.dtype} ".encode())
        digest.update(value.ravel().view(np.uint8))
    return digest.hexdigest()


class DistillationLosses(NamedTuple):
    """Losses of an imitation.

    Attributes:
      losses: `[B, T]`.
      loss_mask: `[B, T]`, the losses that count.
    """

    losses: Float[Array, "B T"]
    loss_mask: Bool[Array, "B T"]

    def sums(self, z_loss: float = 0.0) -> tuple[Float[Array, ""], Integer[Array, ""]]:
        """Sum of the losses that count; no predictions are counted as correct."""
        assert not z_loss  # refused by `resolve_settings`
        return jnp.sum(self.losses * self.loss_mask), jnp.zeros((), jnp.int32)


@dataclass(frozen=True)
class Distillation:
    """The teacher of a run, and its objective: a function of a model, a batch, a random key and the
    teacher's parameters.

    Attributes:
      config: the settings.
      model: the architecture of the trained model.
      teacher: the teacher, in the memory of this host.
      new: names of the parameters of the model that the teacher does not have.
    """

    config: DistillationConfig
    model: LanguageModelConfig
    teacher: LanguageModel
    new: frozenset[str]

    def __post_init__(self) -> None:
        if self.config.target == "attention" and not any(self.replaced):
            raise UserError(
                "distillation.target='attention': all layers of model.attention have the teacher's "
                "mechanism; choose another mechanism for some, or target='logits'"
            )

    @property
    def replaced(self) -> list[bool]:
        """Whether each layer differs from the teacher's, for a period of both layer patterns."""
        return replaced_layers(self.model, self.teacher.config)

    @classmethod
    def of(cls, config: DistillationConfig, model: LanguageModelConfig) -> "Distillation | None":
        """The distillation into a model, with settings that `check_teacher` accepts; None without a
        teacher.

        Raises:
          UserError: as `load_run` for the teacher; or no layer differs from the teacher's, and
            `config.target` is "attention".
        """
        if config.teacher is None:
            return None
        precision = Precision(dtype=config.teacher_dtype, param_dtype=config.teacher_dtype)
        teacher, _, _ = load_run(config.teacher, on_host=True, precision=precision)
        return cls(config, model, teacher, new_parameters(model, teacher.config))

    def start(self) -> Mapping[str, np.ndarray]:
        """The initial weights by name, from the latest checkpoint of `config.start` or from the
        teacher. Parameters that are initialized randomly are left out."""
        config, source = self.config, self.teacher
        if folder := config.start or (config.teacher_dtype and config.teacher):
            source, _, _ = load_run(folder, best=config.start is None, on_host=True)
        return shared_weights(self.model, source)

    @cached_property
    def weights_hash(self) -> str:
        """`hash_of_weights` of the teacher."""
        return hash_of_weights(self.teacher)

    def check_unchanged(self, workdir: Path) -> None:
        """Check that the teacher has the weights that a run has recorded, if any.

        Raises:
          UserError: it has other weights.
        """
        path = workdir / TEACHER_FILE
        if path.exists() and path.read_text() != self.weights_hash:
            raise UserError(
                f"distillation.teacher={self.config.teacher}: its weights have changed since the "
                f"run in {workdir} recorded them; bring them back, give --allow-change to resume "
                "with the new ones, or --restart to begin again"
            )

    def record(self, workdir: Path) -> None:
        """Record the teacher's weights in a run's folder."""
        with storage_errors(workdir):
            write_atomically(workdir / TEACHER_FILE, self.weights_hash.encode())

    def parameters(self, mesh: Mesh) -> nnx.State:
        """The teacher's parameters on the devices of a mesh."""
        return put(nnx.state(self.teacher, nnx.Param), mesh)

    def abstract_parameters(self, mesh: Mesh) -> nnx.State:
        """Shapes, dtypes and shardings of `parameters`."""
        shapes = nnx.state(LanguageModel.abstract(self.teacher.config), nnx.Param)
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            shapes,
            shardings(shapes, mesh),
        )

    def release(self) -> None:
        """Free the teacher's copy in the memory of this host. Its graph remains, so that the losses
        can be computed with the parameters on the devices."""
        weights = LanguageModel.abstract(self.teacher.config)
        nnx.update(self.teacher, nnx.state(weights, nnx.Param))

    def trained(self, parameters: PyTree) -> PyTree[bool] | None:
        """Whether each parameter is trained; None if all are. With the target "attention", only
        parameters of the replaced attention layers are.

        Raises:
          UserError: no parameter is trained, since the teacher has all of them.
        """
        is_attention, pattern = self.config.target == "attention", len(self.model.layers)
        if self.config.trained == "all" and not is_attention:
            return None
        places = {place % pattern for place, is_other in enumerate(self.replaced) if is_other}
        parts = tuple(f"blocks.{place}.attention." for place in places)
        chosen = [
            (self.config.trained == "all" or name in self.new)
            and (not is_attention or name.startswith(parts))
            for name in flatten_with_names(parameters)
        ]
        if not any(chosen):
            raise UserError(
                "distillation.trained='new': the teacher has all parameters of the model; set it "
                "to 'all'"
            )
        return jax.tree.unflatten(jax.tree.structure(parameters), chosen)

    def __call__(
        self, model: LanguageModel, batch: Batch, key: RandomKey, teacher: nnx.State
    ) -> DistillationLosses:
        """The losses of a batch: with the target "attention", errors of the outputs of attention
        layers at the tokens up to the last prediction; else losses of the predictions.

        Args:
          model: the trained model.
          batch: the batch.
          key: not used.
          teacher: the parameters of the teacher, as `parameters` returns them.
        """
        del key
        theirs = nnx.merge(nnx.graphdef(self.teacher), teacher)
        segment_ids = jax.tree.map(jnp.asarray, batch.input_segments)
        tokens = jnp.asarray(batch.tokens)[:, :-1]
        if self.config.target == "attention":
            # later layers read all outputs but those after the last prediction, such as padding
            is_predicted = jnp.asarray(batch.loss_mask).astype(jnp.int32)
            mask = lax.cummax(is_predicted, axis=1, reverse=True) > 0
            losses = self._attention_errors(model, theirs, tokens, segment_ids, mask)
            return DistillationLosses(losses, mask)
        features, _ = model.features(tokens, segment_ids=segment_ids)
        teacher_features, _ = theirs.features(tokens, segment_ids=segment_ids)
        losses = distilled_losses(
            model.readout,
            features,
            theirs.readout,
            teacher_features,
            jnp.asarray(batch.targets),
            divergence_weight=self.config.divergence_weight,
        )
        return DistillationLosses(losses, jnp.asarray(batch.loss_mask))

    def _attention_errors(
        self,
        model: LanguageModel,
        teacher: LanguageModel,
        tokens: Integer[Array, "B T"],
        segment_ids: Integer[Array, "B T"] | None,
        mask: Bool[Array, "B T"],
    ) -> Float[Array, "B T"]:
        """The squared errors of the outputs of replaced attention layers, relative to the mean
        square of the teacher's at the tokens of the mask in this batch or microbatch; the mean over
        these layers. All layers have the teacher's inputs, which are computed once."""

        def visit(
            ours: Block,
            theirs: Block,
            is_replaced: bool,
            carry: tuple[Features, Array],
            element: None,
        ) -> tuple[tuple[Features, Array], None]:
            del element
            x, errors = carry
            normed, inputs, _ = theirs.attention_input(x, segment_ids=segment_ids)
            wanted = theirs.attention(inputs, segment_ids=segment_ids)
            if is_replaced:
                graph, parameters = nnx.split(ours.attention)

                def error(parameters: nnx.State, inputs: Features, wanted: Features) -> Array:
                    outputs = nnx.merge(graph, parameters)(inputs, segment_ids=segment_ids)
                    return _relative_errors(outputs, wanted, mask)

                if model.config.remat:
                    policy = getattr(jax.checkpoint_policies, model.config.remat_policy)
                    error = jax.checkpoint(error, prevent_cse=False, policy=policy)
                errors = errors + error(parameters, inputs, wanted)
            x, _ = theirs.after_attention(x, normed, wanted, segment_ids=segment_ids)
            return (x, errors), None

        x, _ = teacher.embedded(tokens, segment_ids)
        start = x, jnp.zeros(tokens.shape, jnp.float32)
        (_, errors), _ = through_layers(model, teacher, visit, start)
        replaced = self.replaced
        return errors / (sum(replaced) * model.config.num_layers // len(replaced))


def _relative_errors(
    outputs: Features, wanted: Features, mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """|outputs - wanted|^2 / mean |wanted|^2, with the mean over the tokens of the mask."""
    outputs, wanted = outputs.astype(jnp.float32), wanted.astype(jnp.float32)
    total = jnp.sum(jnp.sum(wanted**2, -1) * mask)
    mean = jnp.maximum(total / jnp.maximum(jnp.sum(mask), 1), jnp.finfo(jnp.float32).tiny)
    return jnp.sum((outputs - wanted) ** 2, -1) / mean
