"""How a run is trained, and whether the parts of an experiment fit one another."""

from typing import Annotated, Protocol, runtime_checkable

import pydantic
from flax import nnx
from jax.sharding import Mesh

from heinsen_jax.attention import mechanism, names
from heinsen_jax.data import AnyDataConfig, DataConfig, Dataset
from heinsen_jax.data.dataset import DataSettings
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.sharding import MeshConfig, make_mesh, share_of_process
from heinsen_jax.training.optimizer import OptimizerConfig, learning_rate
from heinsen_jax.typing import config_dataclass


@config_dataclass
class TrainingConfig:
    """How long to train, and how often to look."""

    steps: pydantic.PositiveInt = 1000
    """Updates in all."""
    accumulation_steps: pydantic.PositiveInt = 1
    """Parts of a batch whose gradients are summed before an update."""
    log_every: pydantic.PositiveInt = 10
    """Steps between two rows of training metrics."""
    evaluate_every: pydantic.PositiveInt = 250
    """Steps between two evaluations, each with a checkpoint and a sample; the last step has one."""
    evaluation_batches: pydantic.PositiveInt | None = None
    """Batches of an evaluation; the whole validation text when None."""
    checkpoint_every: pydantic.PositiveInt | None = None
    """Steps between two checkpoints besides those of evaluations."""
    keep_checkpoints: pydantic.PositiveInt = 2
    """How many of the latest checkpoints stay, besides the best."""
    sample_prompt: str = "\n"
    """What a sample begins with."""
    sample_tokens: pydantic.NonNegativeInt = 200
    """Tokens of a sample; 0 for none."""
    skip_grad_norm_ratio: pydantic.PositiveFloat | None = 20.0
    """An update is skipped if its gradient's norm is more than so many times the usual one; None:
    never. Updates that are not finite always are."""
    max_consecutive_skips: pydantic.PositiveInt = 20
    """Training ends when so many updates in a row were skipped."""
    shutdown_timeout: pydantic.PositiveFloat = 60.0
    """Seconds after SIGTERM or Ctrl-C in which a run must have saved what it has."""
    data_timeout: pydantic.PositiveFloat = 600.0
    """Seconds after which a run ends that waits for its next batch."""
    compilation_cache: str | None = None
    """A folder where compiled functions are kept, for the next run with the same settings."""
    masked_fraction: Annotated[float, pydantic.Field(gt=0, lt=1)] = 0.15
    """How much of a text a model has to fill in, if it is not causal."""


@runtime_checkable
class Experiment(Protocol):
    """What `train` needs of an experiment's configuration."""

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


def check_settings(dataset: Dataset, experiment: Experiment) -> Mesh:
    """Makes sure that the parts of an experiment fit one another, and returns its mesh.

    Raises:
      UserError: they do not; the message names the fields and the mend.
    """
    model, data, training = experiment.model, experiment.data, experiment.training
    vocabulary = dataset.vocab_size
    if model.vocab_size < vocabulary:
        of = f"data.tokenizer={data.tokenizer}" if isinstance(data, DataConfig) else data.task
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of {of}: make it "
            f"at least {vocabulary}"
        )
    if training.sample_tokens:
        if dataset.tokenizer is None:
            raise UserError(f"{dataset.name} is of no text to sample: set training.sample_tokens=0")
        if not dataset.tokenizer.encode_ordinary(training.sample_prompt):
            raise UserError("training.sample_prompt is empty: give a character, or sample_tokens=0")
    if not model.is_causal:
        _check_masked(model, training, vocabulary)
    if model.max_length is not None and data.longest > model.max_length:
        raise UserError(
            f"data has texts of up to {data.longest} tokens, for which model.max_length="
            f"{model.max_length} gives no positions: make it at least {data.longest}"
        )
    dataset.train_row(data, experiment.seed)
    dataset.validation_rows(data)
    learning_rate(experiment.optimizer, training.steps)
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
    return mesh


def _check_split(model: LanguageModelConfig, data: DataSettings, mesh: Mesh) -> None:
    """Whether texts and heads can be split as the mesh asks for."""
    tensor, context = mesh.shape["tensor"], mesh.shape["context"]
    if model.num_heads % tensor:
        raise UserError(f"mesh.tensor={tensor} does not divide model.num_heads={model.num_heads}")
    if data.sequence_length % context:
        raise UserError(
            f"mesh.context={context} does not divide data.sequence_length={data.sequence_length}"
        )
    if context == 1:
        return
    abstract = nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(0)))
    for name, block in zip(model.layer_pattern, abstract.blocks, strict=True):
        if not block.attention.capabilities.mergeable:
            able = [name for name in names() if mechanism(name).capabilities.mergeable]
            raise UserError(
                f"mesh.context={context} with model.attention={name!r}, as it is configured: a "
                f"text cannot be split, for its states do not merge. Use mesh.context=1, or one of "
                f"{', '.join(able)} without a window"
            )


def _check_masked(model: LanguageModelConfig, training: TrainingConfig, vocabulary: int) -> None:
    if model.vocab_size == vocabulary:
        raise UserError(
            f"model.vocab_size={model.vocab_size} with model.is_causal=False: make it at least "
            f"{vocabulary + 1}, for the mask is a token of its own"
        )
    if training.sample_tokens:
        raise UserError(
            "model.is_causal=False, and such a model cannot write: set training.sample_tokens=0"
        )
