"""Plan of a linearization: the teacher, and the experiments of all runs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from heinsen_jax.config.load import load_config
from heinsen_jax.config.override import override
from heinsen_jax.data import AnyDataConfig, DataConfig
from heinsen_jax.data.sources import DEFAULT_COLUMN
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.models.config import Dtype
from heinsen_jax.models.conversion import linear_layers, new_parameters, with_lora
from heinsen_jax.runs.folder import RunFolder, open_run
from heinsen_jax.runs.load import load_architecture
from heinsen_jax.runs.record import CONFIG_FILE, DATA_FILE
from heinsen_jax.training.config import DistillationConfig, ExperimentConfig, OptimizerConfig
from heinsen_jax.training.layerwise import replaced_layers
from heinsen_jax.typing import config_dataclass

TRANSFER_SUFFIX, FURTHER_SUFFIX, WINDOW_SUFFIX = "-transfer", "-teacher", "-window"
"""Suffixes of the folders of attention transfer, of the teacher trained further, and of windows
alone."""
SUFFIXES = TRANSFER_SUFFIX, FURTHER_SUFFIX, WINDOW_SUFFIX
TRANSFER, LINEARIZED = "attention transfer", "linearized"
FURTHER, WINDOW = "teacher trained further", "windows alone"
"""Names of the runs."""
WINDOW_SIZE = 64
"""Size of these windows, in tokens, unless the new layers have one."""
COMPUTATION = {
    f"__model.{name}" for name in ("dtype", "param_dtype", "remat", "no_remat", "remat_policy")
}
"""Fields of the model that do not change its architecture."""
CHOSEN = {"__training.accumulation_steps", "__model.remat", "__model.no_remat"}
"""Fields that are chosen by the memory, unless they are given."""


@config_dataclass
class Options:
    """Replace softmax attention of a trained model by a mechanism with a state of constant size."""

    model: str
    """The teacher: a run's folder, or a model folder."""
    workdir: str
    """Folder of the linearized model's run."""
    data: str | None = None
    """Text to train on; the teacher's data when None."""
    attention: tuple[str, ...] = ("log_window",)
    """Mechanism of the new layers, as mechanism:option=value,...; of several, a pattern that is
    repeated over the layers, such as gated_deltanet:repeats=3 sliding_window."""
    keep: tuple[str, ...] = ()
    """Layers that stay as they are: indices from 0, or slices such as 3::4; or auto:N, for the N
    layers that, if they stay, reduce the divergence from the teacher most."""
    initialization_tokens: int = 4096
    """Tokens of the training text on which new layers are fitted to the teacher's before the first
    update, and layers to keep are chosen; 0 for neither."""
    transfer_steps: int = 0
    """Updates of attention transfer."""
    transfer_learning_rate: float = 1e-2
    """Peak learning rate of attention transfer."""
    steps: int = 500
    """Updates of distillation."""
    divergence_weight: float = 0.5
    """Weight of the teacher's predictions in the loss of distillation."""
    teacher_dtype: Dtype | None = None
    """Dtype of the teacher's matrices and of activations in its matrix products during training,
    such as bfloat16; as saved when None."""
    lora_rank: int | None = None
    """In distillation, train only new parameters and low-rank additions of this rank to the
    projections of attention (LoRA); all parameters when None."""
    baselines: bool = True
    """Train two further models on as many tokens, for the table: the teacher itself, and a model
    with windows in place of the new layers."""
    restart: bool = False
    """Repeat all runs; earlier ones are moved into subfolders."""
    allow_change: bool = False
    """Resume runs although data, settings or the teacher have changed."""


class Stage(NamedTuple):
    """A part of a linearization, or a baseline: a run in a folder."""

    name: str
    folder: str
    experiment: ExperimentConfig


def name_of(option: str) -> str:
    """The name of an option such as --training.log-every=10, with underscores."""
    return option.partition("=")[0].replace("-", "_")


def are_microbatches_given(overrides: Sequence[str]) -> bool:
    """Whether an override sets one of the fields that are otherwise chosen by the memory."""
    return any(name_of(option) in CHOSEN for option in overrides)


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides of fields that differ by run.

    Raises:
      UserError: an override sets one of these fields.
    """
    for option in overrides:
        name = name_of(option)
        is_own = name.startswith(("__distillation", "__training.steps", "__model"))
        if is_own and name not in COMPUTATION:
            raise UserError(
                f"{option}: differs by run; give options of this command, such as --steps and "
                "--attention, instead"
            )


def read_teacher(options: Options, run: RunFolder) -> ExperimentConfig:
    """The teacher's experiment, with the data to train on."""
    load_architecture(options.model)  # raises if the folder is no model
    teacher = load_config(run.files / CONFIG_FILE)
    if teacher.model.lora_rank is not None:
        raise UserError(
            f"--model {options.model} has low-rank additions (model.lora_rank); add them to its "
            "matrices first, with heinsen_jax.interop.transformers export and import"
        )
    teacher = replace(teacher, training=replace(teacher.training, start=None))
    has_text = (run.files / DATA_FILE).exists()
    if options.data is None and isinstance(teacher.data, DataConfig) and not has_text:
        raise UserError(
            f"--data is missing: {options.model} has no record of its training text; give a file, "
            "a folder or the name of a corpus"
        )
    if options.data is not None:
        if not isinstance(teacher.data, DataConfig):
            raise UserError(
                f"--data {options.data}: {options.model} is trained on a task; leave it out"
            )
        changed = {"corpus": options.data, "mixture": None, "mixture_stages": ()}
        changed |= {"text_column": DEFAULT_COLUMN, "validation_fraction": None}
        changed |= {"test_fraction": 0.0}
        teacher = replace(teacher, data=replace(teacher.data, **changed))
    return teacher


def check_options(options: Options) -> None:
    """Check the options that concern no file.

    Raises:
      UserError: one is out of its range.
    """
    if options.initialization_tokens < 0:
        raise UserError(
            f"--initialization-tokens {options.initialization_tokens}: must not be negative; give "
            "0 to leave the fit out"
        )
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: must be at least 1; give more")
    if options.transfer_steps < 0:
        raise UserError(
            f"--transfer-steps {options.transfer_steps}: must not be negative; give 0 to leave "
            "attention transfer out"
        )
    if options.transfer_learning_rate <= 0:
        raise UserError(
            f"--transfer-learning-rate {options.transfer_learning_rate}: must be greater than 0; "
            f"the default is {Options.transfer_learning_rate}"
        )


def plan_stages(
    teacher: ExperimentConfig, options: Options, overrides: Sequence[str]
) -> list[Stage]:
    """The runs of a linearization, and of its baselines.

    Raises:
      UserError: the mechanism or an option is unsupported.
    """
    model = linear_layers(teacher.model, options.attention, options.keep)
    windows = _windows(teacher.model, model, options) if options.baselines else None
    settings = DistillationConfig(
        teacher=options.model,
        teacher_dtype=options.teacher_dtype,
        divergence_weight=options.divergence_weight,
        initialization_tokens=options.initialization_tokens,
    )
    student = settings if options.lora_rank is None else replace(settings, trained="new")
    base = replace(
        teacher,
        data=_data(teacher, [model] if windows is None else [model, windows]),
        optimizer=replace(teacher.optimizer, warmup_steps=_warmup(teacher, options)),
        training=replace(teacher.training, z_loss=0.0),
    )

    def experiment(
        model: LanguageModelConfig, steps: int, distillation: DistillationConfig, seed: int = 2
    ) -> ExperimentConfig:
        # other batches than the teacher's, and in attention transfer than later
        changed = {"model": model, "distillation": distillation, "seed": teacher.seed + seed}
        changed["training"] = replace(base.training, steps=steps)
        return override(replace(base, **changed), overrides)

    def with_additions(model: LanguageModelConfig) -> LanguageModelConfig:
        return model if options.lora_rank is None else with_lora(model, options.lora_rank)

    stages, steps, distillation = [], options.steps, student
    if options.transfer_steps and new_parameters(model, teacher.model):
        folder, rate = options.workdir + TRANSFER_SUFFIX, options.transfer_learning_rate
        first = experiment(model, options.transfer_steps, settings, seed=1)
        transfer = attention_transfer(first, options.transfer_steps, rate)
        stages.append(Stage(TRANSFER, folder, transfer))
        distillation = replace(student, start=folder, initialization_tokens=0)
        steps += options.transfer_steps
    second = experiment(with_additions(model), options.steps, distillation)
    stages.append(Stage(LINEARIZED, options.workdir, second))
    if options.baselines:
        further = replace(teacher.model, lora_rank=options.lora_rank)
        further = experiment(further, steps, DistillationConfig())
        further = replace(further, training=replace(further.training, start=options.model))
        stages.append(Stage(FURTHER, options.workdir + FURTHER_SUFFIX, further))
    if windows is not None:
        alone = experiment(with_additions(windows), steps, student)
        stages.append(Stage(WINDOW, options.workdir + WINDOW_SUFFIX, alone))
    return stages


def _windows(
    teacher: LanguageModelConfig, model: LanguageModelConfig, options: Options
) -> LanguageModelConfig | None:
    """The architecture of the baseline with windows in place of the new layers, as large as theirs,
    if they have windows; None if it is the linearized model itself."""
    replaced, mechanisms = replaced_layers(model, teacher), model.mechanisms()
    sizes = [
        size
        for layer, is_replaced in enumerate(replaced)
        if is_replaced and (size := getattr(mechanisms[layer % len(mechanisms)], "window_size", 0))
    ]
    attention = f"sliding_window:window_size={[*sizes, WINDOW_SIZE][0]}"
    try:
        windows = linear_layers(teacher, attention, options.keep)
    except UserError as error:
        raise UserError(
            f"the baseline with windows alone is unsupported ({error}); give --no-baselines"
        ) from None
    return None if windows == model else windows


def _data(teacher: ExperimentConfig, models: Sequence[LanguageModelConfig]) -> AnyDataConfig:
    """The teacher's data, with the same treatment of documents for all models: they are continuous
    if a model cannot separate them."""
    data = teacher.data
    configs = [layer for model in models for layer in model.mechanisms()]
    if not isinstance(data, DataConfig) or data.documents is not None:
        return data
    if all(config.capabilities.segments for config in configs):
        return data
    return replace(data, documents="continuous")


def _warmup(teacher: ExperimentConfig, options: Options) -> int:
    """Warmup steps of distillation. When it resumes: as recorded, so that it may get more updates.
    Otherwise: as for the teacher, but at most a tenth of the updates."""
    with open_run(options.workdir) as run:
        path = run.files / CONFIG_FILE
        if path.exists() and not options.restart:
            return load_config(path).optimizer.warmup_steps
    return min(teacher.optimizer.warmup_steps, options.steps // 10)


def attention_transfer(
    finetuning: ExperimentConfig, steps: int, learning_rate: float = 1e-2
) -> ExperimentConfig:
    """Attention transfer: AdamW, without weight decay.

    Args:
      finetuning: distillation, with its teacher.
      steps: number of updates.
      learning_rate: peak learning rate; it decays to a hundredth.

    Returns:
      The experiment, with the same data and architecture.
    """
    return replace(
        finetuning,
        training=replace(finetuning.training, steps=steps, sample_tokens=0),
        distillation=replace(finetuning.distillation, target="attention", trained="new"),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate,
            end_learning_rate=learning_rate / 100,
            warmup_steps=steps // 20,
            weight_decay=0.0,
        ),
    )
