"""Settings of a run that fit together: every check that needs no folder."""

from dataclasses import dataclass

import jax
from jax.sharding import Mesh

from heinsen_jax.attention import mechanism, names
from heinsen_jax.attention.registry import parts_of
from heinsen_jax.data import AnyDataConfig, DataConfig, Dataset, Tokenizer, start_ids
from heinsen_jax.data.dataset import DataSettings
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.objectives.documents import resolve_documents
from heinsen_jax.runs.load import load_architecture
from heinsen_jax.sharding import make_mesh, share_of_process
from heinsen_jax.training.config import ExperimentConfig, TrainingConfig
from heinsen_jax.training.distillation import check_teacher
from heinsen_jax.training.optimizer import learning_rates
from heinsen_jax.training.tracker_services import services


@dataclass(frozen=True)
class Settings:
    """Settings that fit together.

    Attributes:
      config: the configuration.
      dataset: the data set.
      data: `config.data`, with the documents resolved.
      mesh: the devices.
      lines: lines about documents and packing to print.
    """

    config: ExperimentConfig
    dataset: Dataset
    data: AnyDataConfig
    mesh: Mesh
    lines: tuple[str, ...]


def resolve_settings(
    config: ExperimentConfig, dataset: Dataset, mesh: Mesh | None = None
) -> Settings:
    """Check the sections of a configuration against each other and the data set.

    Args:
      config: the configuration.
      dataset: the data set.
      mesh: the devices, instead of `config.mesh`'s.

    Raises:
      UserError: two fields are incompatible; the message names them and the fix.
    """
    model, training = config.model, config.training
    data, lines = resolve_documents(config.data, dataset, model)
    vocabulary = dataset.vocab_size
    if model.vocab_size < vocabulary:
        owner = f"data.tokenizer={data.tokenizer}" if isinstance(data, DataConfig) else data.task
        raise UserError(
            f"model.vocab_size={model.vocab_size} is smaller than the vocabulary of {owner}; make "
            f"it at least {vocabulary}"
        )
    if training.sample_tokens:
        if dataset.tokenizer is None:
            raise UserError(f"{dataset.name} has no text to sample; set training.sample_tokens=0")
        if not dataset.tokenizer.encode(training.sample_prompt):
            raise UserError(
                "training.sample_prompt is empty; give a character, or set sample_tokens=0"
            )
        _check_sample(model, training, dataset.tokenizer)
    if training.loss_by_position and not (model.is_causal and isinstance(data, DataConfig)):
        raise UserError("training.loss_by_position is for causal models of text; set it to False")
    check_teacher(config.distillation, model)
    _check_start(config)
    if training.z_loss and config.distillation.teacher is not None:
        raise UserError(f"training.z_loss={training.z_loss}: distillation has none; set it to 0")
    if not model.is_causal:
        _check_masked(model, training, dataset)
    if model.max_length is not None and data.longest > model.max_length:
        raise UserError(
            f"model.max_length={model.max_length} is shorter than sequences of {data.longest} "
            f"tokens; make it at least {data.longest}"
        )
    dataset.train_row(data, config.seed)
    dataset.held_out_rows(data)
    learning_rates(config.optimizer, training.steps)
    if jax.process_index() == 0:
        services(training.trackers)
    mesh = make_mesh(config.mesh) if mesh is None else mesh
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
    if (teacher := config.distillation.teacher) is not None:
        _check_mergeable(load_architecture(teacher), mesh, " of distillation.teacher")
    return Settings(config, dataset, data, mesh, tuple(lines))


def _check_sample(
    model: LanguageModelConfig, training: TrainingConfig, tokenizer: Tokenizer
) -> None:
    """Check that the model has positions for samples."""
    if model.max_length is None:
        return
    prompt = len([*start_ids(tokenizer), *tokenizer.encode(training.sample_prompt)])
    if prompt + training.sample_tokens - 1 > model.max_length:
        raise UserError(
            f"training.sample_tokens={training.sample_tokens} after {prompt} tokens of "
            f"training.sample_prompt exceed model.max_length={model.max_length}; set it to at most "
            f"{max(model.max_length - prompt + 1, 0)}"
        )


def _check_start(config: ExperimentConfig) -> None:
    """Check what the initial weights and their dtype are used for."""
    model, start = config.model, config.training.start
    if start is not None and config.distillation.teacher is not None:
        raise UserError(
            f"training.start={start} with distillation.teacher: set training.start=None, and "
            "distillation.start to that folder if its weights are to be used"
        )
    if model.lora_rank is not None and start is None:
        raise UserError(
            f"model.lora_rank={model.lora_rank} adds to given weights; set training.start to the "
            "folder of their model"
        )
    is_small = model.param_dtype == "bfloat16" and model.lora_rank is None
    if is_small and config.optimizer.ema_decay is not None:
        raise UserError(
            f"optimizer.ema_decay={config.optimizer.ema_decay} needs parameters in float32; set "
            "model.param_dtype=float32 or optimizer.ema_decay=None"
        )


def _check_split(model: LanguageModelConfig, data: DataSettings, mesh: Mesh) -> None:
    """Check that the mesh divides sequences and heads."""
    tensor, context = mesh.shape["tensor"], mesh.shape["context"]
    if model.num_heads % tensor:
        raise UserError(f"mesh.tensor={tensor} does not divide model.num_heads={model.num_heads}")
    layers = zip(model.layer_pattern, model.mechanisms(), strict=True)
    for layer, config in (x for pair in layers for x in parts_of(*pair).items()):
        for name in ("num_key_heads", "num_value_heads"):
            number = getattr(config, name, None) or 1
            if number > 1 and number % tensor:
                raise UserError(f"mesh.tensor={tensor} does not divide {name}={number} of {layer}")
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
    for name, config in zip(model.layer_pattern, model.mechanisms(), strict=True):
        if not config.capabilities.mergeable:
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
