"""Configuration of training, and checks across the sections of an experiment."""

import dataclasses
import json
from typing import Annotated, Literal, Protocol, runtime_checkable

import jax
import pydantic
from jax.sharding import Mesh

from heinsen_jax.attention import mechanism, names
from heinsen_jax.data import AnyDataConfig, DataConfig, Dataset, TextDataset
from heinsen_jax.data.dataset import DataSettings
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.sharding import MeshConfig, make_mesh, share_of_process
from heinsen_jax.training.checkpoint import load_architecture
from heinsen_jax.training.distillation import DistillationConfig, check_teacher
from heinsen_jax.training.optimizer import OptimizerConfig, learning_rates
from heinsen_jax.training.tracker_services import services
from heinsen_jax.typing import JSON, config_dataclass


@config_dataclass
class TrainingConfig:
    """Length of training, evaluations, checkpoints, samples and safety limits."""

    steps: Annotated[int, pydantic.Field(gt=0, le=100_000_000)] = 1000
    """Number of updates."""
    accumulation_steps: pydantic.PositiveInt = 1
    """Number of microbatches per update, whose gradients are summed."""
    log_every: pydantic.PositiveInt = 10
    """Number of steps between reports of training metrics."""
    evaluate_every: pydantic.PositiveInt = 250
    """Number of steps between evaluations, each with a checkpoint and a sample; the last step
    always has one."""
    evaluation_batches: pydantic.PositiveInt | None = None
    """Number of batches per evaluation, from the start of the validation split, or of the split of
    each corpus of a mixture; all when None."""
    loss_by_position: bool = False
    """Whether evaluations of causal models of text report `loss_<length>_at_<end>` of the longest
    sequences: the mean loss at positions below 16, then below each power of 2, from the one before,
    up to the length. Positions are counted in each document if documents are separate."""
    checkpoint_every: pydantic.PositiveInt | None = None
    """Number of steps between checkpoints, in addition to those of evaluations; no others when
    None."""
    checkpoint_minutes: pydantic.PositiveFloat | None = 10.0
    """Minutes between checkpoints, in addition to those by steps; the first one within a minute.
    None disables this."""
    keep_checkpoints: pydantic.PositiveInt = 2
    """Number of latest checkpoints to keep, in addition to the best one."""
    sample_prompt: str = "\n"
    """Prompt of the samples from the model."""
    sample_tokens: pydantic.NonNegativeInt = 200
    """Number of tokens of a sample; 0 disables samples."""
    z_loss: pydantic.NonNegativeFloat = 0.0
    """Weight, such as 1e-4, of the squared logarithm of the softmax's normalizer in the training
    loss, which keeps logits small; included in train/loss, not in validation/loss."""
    skip_grad_norm_ratio: pydantic.PositiveFloat | None = 20.0
    """Skip an update whose gradient norm exceeds this multiple of its running mean; None disables
    this. Updates that are not finite are always skipped."""
    max_consecutive_skips: pydantic.PositiveInt = 20
    """Number of consecutive skipped updates that ends training."""
    shutdown_timeout: pydantic.PositiveFloat = 60.0
    """Seconds after SIGTERM or Ctrl-C within which the run must have saved a checkpoint."""
    data_timeout: pydantic.PositiveFloat = 600.0
    """Seconds to wait for the next batch before the run ends with an error."""
    compilation_cache: str | None = None
    """Folder of JAX's persistent compilation cache, for fast restarts. When None:
    JAX_COMPILATION_CACHE_DIR, or in a run of one process `heinsen_jax` in XDG_CACHE_HOME or
    ~/.cache, with at most 2 GiB."""
    masked_fraction: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.15
    """Fraction of the tokens that a bidirectional model is trained to predict."""
    trackers: tuple[Literal["wandb", "trackio", "mlflow"], ...] = ()
    """Experiment trackers that record the metrics, in addition to metrics.jsonl and TensorBoard;
    each needs the extra of its name."""
    project: str = "heinsen_jax"
    """Project of the trackers; the run is named after its folder."""


@runtime_checkable
class Experiment(Protocol):
    """Sections of the configuration that `train` reads."""

    @property
    def seed(self) -> int: ...
    @property
    def model(self) -> LanguageModelConfig: ...
    @property
    def data(self) -> AnyDataConfig: ...
    @property
    def optimizer(self) -> OptimizerConfig: ...
    @property
    def training(self) -> TrainingConfig: ...
    @property
    def mesh(self) -> MeshConfig: ...
    @property
    def distillation(self) -> DistillationConfig: ...


def plain_values(experiment: Experiment) -> dict[str, JSON]:
    """The sections of an experiment as plain values."""
    names = "model", "data", "optimizer", "training", "mesh", "distillation"
    sections = {name: dataclasses.asdict(getattr(experiment, name)) for name in names}
    return json.loads(json.dumps({"seed": experiment.seed, **sections}))


def check_settings(dataset: Dataset, experiment: Experiment) -> Mesh:
    """Check the sections of an experiment against each other, and return its mesh.

    Raises:
      UserError: two fields are incompatible; the message names them and the fix.
    """
    model, training = experiment.model, experiment.training
    data, _ = with_documents(experiment.data, dataset, model)
    vocabulary = dataset.vocab_size
    if model.vocab_size < vocabulary:
        of = f"data.tokenizer={data.tokenizer}" if isinstance(data, DataConfig) else data.task
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of {of}; make "
            f"it at least {vocabulary}"
        )
    if training.sample_tokens:
        if dataset.tokenizer is None:
            raise UserError(f"{dataset.name} has no text to sample; set training.sample_tokens=0")
        if not dataset.tokenizer.encode(training.sample_prompt):
            raise UserError(
                "training.sample_prompt is empty; give a character, or set sample_tokens=0"
            )
    if training.loss_by_position and not (model.is_causal and isinstance(data, DataConfig)):
        raise UserError("training.loss_by_position is for causal models of text; set it to False")
    check_teacher(experiment.distillation, model)
    if training.z_loss and experiment.distillation.teacher is not None:
        raise UserError(f"training.z_loss={training.z_loss}: distillation has none; set it to 0")
    if not model.is_causal:
        _check_masked(model, training, dataset)
    if model.max_length is not None and data.longest > model.max_length:
        raise UserError(
            f"model.max_length={model.max_length} is shorter than sequences of {data.longest} "
            f"tokens; make it at least {data.longest}"
        )
    dataset.train_row(data, experiment.seed)
    dataset.validation_rows(data)
    learning_rates(experiment.optimizer, training.steps)
    if jax.process_index() == 0:
        services(training.trackers)
    mesh = make_mesh(experiment.mesh)
    share_of_process(mesh)
    parts = mesh.shape["data"] * mesh.shape["fsdp"]
    if data.batch_size % (training.accumulation_steps * parts):
        raise UserError(
            f"data.batch_size={data.batch_size} must be a multiple of "
            f"training.accumulation_steps={training.accumulation_steps} times the {parts} "
            "device(s) of mesh.data and mesh.fsdp"
        )
    _check_split(model, data, mesh)
    _check_mergeable(model, mesh)
    if (teacher := experiment.distillation.teacher) is not None:
        _check_mergeable(load_architecture(teacher), mesh, " of distillation.teacher")
    return mesh


def with_documents(
    data: AnyDataConfig, dataset: Dataset, model: LanguageModelConfig
) -> tuple[AnyDataConfig, list[str]]:
    """The configuration with `data.documents` resolved for this data set and model; and lines that
    describe documents and packing, with the reason of a default. None for tasks.

    Raises:
      UserError: separate documents are required, which a mechanism does not support.
    """
    if not isinstance(data, DataConfig) or not isinstance(dataset, TextDataset):
        return data, []
    chosen, reason = dataset.documents(data), ""
    if chosen == "separate" and (unable := _without_segments(model)):
        if data.documents is not None or data.packing == "best_fit":
            able = [name for name in names() if mechanism(name).capabilities.segments]
            asked = "documents=separate" if data.documents else "packing=best_fit"
            raise UserError(
                f"data.{asked}: model.attention={unable!r}, as configured, does not support "
                "segments; set data.documents=continuous and data.packing=windows, or choose one "
                f"of {', '.join(able)}"
            )
        chosen, reason = "continuous", f", since {unable!r} does not support segments"
    elif chosen == "continuous" and data.documents is None:
        reason = ", since no end-of-text token divides the corpus"
    said = [f"documents: {chosen}{reason}"]
    if data.packing == "best_fit":
        said.append(f"packing: best_fit, with {dataset.padding(data):.2%} padding")
    return dataclasses.replace(data, documents=chosen), said


def _without_segments(model: LanguageModelConfig) -> str | None:
    """The first mechanism that does not support segments, as configured."""
    layers = zip(model.layer_pattern, model.abstract_layers(), strict=True)
    return next((name for name, layer in layers if not layer.capabilities.segments), None)


def _check_split(model: LanguageModelConfig, data: DataSettings, mesh: Mesh) -> None:
    """Check that the mesh divides sequences and heads."""
    tensor, context = mesh.shape["tensor"], mesh.shape["context"]
    if model.num_heads % tensor:
        raise UserError(f"mesh.tensor={tensor} does not divide model.num_heads={model.num_heads}")
    if data.sequence_length % context:
        raise UserError(
            f"mesh.context={context} does not divide data.sequence_length={data.sequence_length}"
        )
    is_separate = isinstance(data, DataConfig) and data.documents == "separate"
    if context > 1 and is_separate and not model.is_causal:
        raise UserError(
            f"mesh.context={context}: documents of a bidirectional model cannot be separated in "
            "split sequences; use mesh.context=1, or set data.documents=continuous"
        )


def _check_mergeable(model: LanguageModelConfig, mesh: Mesh, owner: str = "") -> None:
    """Check that the mechanisms of a model run on split sequences."""
    if (context := mesh.shape["context"]) == 1:
        return
    for name, layer in zip(model.layer_pattern, model.abstract_layers(), strict=True):
        if not layer.capabilities.mergeable:
            able = [name for name in names() if mechanism(name).capabilities.mergeable]
            raise UserError(
                f"mesh.context={context}: model.attention={name!r}{owner}, as configured, has no "
                f"states that merge, so sequences cannot be split; use mesh.context=1, or one of "
                f"{', '.join(able)} without a window"
            )


def _check_masked(model: LanguageModelConfig, training: TrainingConfig, dataset: Dataset) -> None:
    if dataset.has_labels:
        raise UserError(
            f"model.is_causal=False: {dataset.name} has labels, and masked tokens are predicted "
            "instead of labels; set it to True"
        )
    if model.vocab_size == (vocabulary := dataset.vocab_size):
        raise UserError(
            f"model.vocab_size={model.vocab_size} with model.is_causal=False leaves no id for the "
            f"mask token; make it at least {vocabulary + 1}"
        )
    if training.sample_tokens:
        raise UserError(
            "training.sample_tokens: a model with is_causal=False cannot generate; set it to 0"
        )
