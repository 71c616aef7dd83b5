"""Configuration of an experiment: `ExperimentConfig` and its sections for training."""

import dataclasses
import json
from typing import Annotated, Any, Literal

import pydantic

from heinsen_jax.data.config import AnyDataConfig, DataConfig
from heinsen_jax.models.config import Dtype, LanguageModelConfig
from heinsen_jax.sharding import MeshConfig
from heinsen_jax.typing import JSON, config_dataclass

Fraction = Annotated[float, pydantic.Field(ge=0, lt=1)]
FinitePositive = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
FiniteNonNegative = Annotated[float, pydantic.Field(ge=0, allow_inf_nan=False)]


@config_dataclass
class OptimizerConfig:
    """Optimizer, schedule of its learning rate, and average of the weights. The defaults are the
    paper's where it gives them (6e-4 to 6e-5), else nanoGPT's."""

    name: Literal["adamw", "muon", "lion"] = "adamw"
    """adamw; muon: orthogonalized momentum for the matrices of the layers, AdamW for the other
    parameters, such as embeddings, both with the learning rates of AdamW; lion: needs learning
    rates that are 3 to 10 times smaller, and 3 to 10 times more weight decay."""
    schedule: Literal["one_cycle", "wsd", "linear", "constant"] = "one_cycle"
    """Learning rate after the warm-up. one_cycle: a cosine to end_learning_rate. wsd (warm-up,
    stable, decay): constant, then linear to end_learning_rate during decay_fraction of the steps.
    linear: linear to end_learning_rate. constant."""
    learning_rate: FinitePositive = 6e-4
    """Peak learning rate, after warm-up."""
    end_learning_rate: FiniteNonNegative = 6e-5
    """Learning rate at the end of the schedule; unused by constant."""
    warmup_steps: pydantic.NonNegativeInt = 100
    """Number of steps of linear warm-up. If they do not end before training or its decay, as in
    short runs, it is a tenth of `training.steps`, and a line says so at the start."""
    decay_fraction: Annotated[float, pydantic.Field(gt=0, le=1)] = 0.2
    """wsd: fraction of the steps during which the learning rate decays."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment (AdamW), or weight of the momentum in an update (Lion)."""
    beta2: Fraction = 0.95
    """Decay rate of the second moment (AdamW), or of the momentum (Lion)."""
    momentum: Fraction = 0.95
    """Decay rate of the momentum of Muon."""
    weight_decay: FiniteNonNegative = 0.1
    """Decoupled weight decay of matrices and embeddings, multiplied by the learning rate; biases,
    scales, convolutions and trained tokens have none."""
    clip_norm: pydantic.PositiveFloat = 1.0
    """Clip gradients to this global norm."""
    ema_decay: Annotated[float, pydantic.Field(gt=0, lt=1)] | None = None
    """Decay rate, per update, of an exponential moving average of the weights, which is evaluated,
    sampled from, and loaded from checkpoints in place of the weights; no average when None."""


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
    """Number of steps between checkpoints, in addition to one at each evaluation. None disables
    this."""
    checkpoint_minutes: pydantic.PositiveFloat | None = 10.0
    """Minutes between further checkpoints; the first one is within a minute. None disables this."""
    start: str | None = None
    """Folder with the initial weights: of a run, its best checkpoint, or of a model, such as an
    imported one. Parameters that it lacks are random; all are when None."""
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


@config_dataclass
class DistillationConfig:
    """Imitation of a teacher, a model with the same sizes and other attention layers."""

    teacher: str | None = None
    """Folder of the teacher, a run or a model folder; no distillation when None."""
    teacher_dtype: Dtype | None = None
    """Dtype of the teacher's matrices and of activations in its matrix products; as saved when
    None. Initial weights are the saved ones in any case."""
    start: str | None = None
    """Folder of the run with the initial weights; the teacher's weights when None. Parameters that
    are not in it are initialized randomly."""
    target: Literal["attention", "logits"] = "logits"
    """attention: the outputs of the teacher's attention layers, for those layers that have another
    mechanism, given the same inputs. logits: the teacher's predictions, and the next token."""
    initialization_tokens: pydantic.NonNegativeInt = 0
    """Tokens of the training text, rounded up to whole sequences, on which layers with another
    mechanism are fitted to the teacher's before the first update (`training.initialization`)."""
    divergence_weight: Annotated[float, pydantic.Field(ge=0, le=1)] = 0.5
    """logits: w, for the loss (1 - w) cross-entropy + w KL(teacher || model)."""
    trained: Literal["all", "new"] = "all"
    """all: all parameters are trained; with the target "attention", all of the replaced attention
    layers. new: among these, only the parameters that the teacher does not have."""


@config_dataclass
class ExperimentConfig:
    """All settings of a run."""

    seed: pydantic.NonNegativeInt = 0
    """Seed of the initial weights, the order of the data, and samples."""
    model: LanguageModelConfig = LanguageModelConfig()
    data: AnyDataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    training: TrainingConfig = TrainingConfig()
    mesh: MeshConfig = MeshConfig()
    distillation: DistillationConfig = DistillationConfig()


def as_json(config: ExperimentConfig) -> dict[str, Any]:
    """The configuration as nested dictionaries of plain values, by section."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def flat(config: dict[str, Any]) -> dict[str, JSON]:
    """The fields of all sections, with names such as data.corpus."""
    fields_by_name = {name: x for name, x in config.items() if not isinstance(x, dict)}
    for section, fields in config.items():
        if isinstance(fields, dict):
            fields_by_name |= {f"{section}.{name}": value for name, value in fields.items()}
    return fields_by_name
