"""Plan of a linearization: the teacher, and the experiments of both stages."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from heinsen_jax.config.load import load_config
from heinsen_jax.config.override import override
from heinsen_jax.data import DataConfig
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.models.conversion import linear_layers, new_parameters, with_lora
from heinsen_jax.runs.folder import RunFolder, open_run
from heinsen_jax.runs.load import load_architecture
from heinsen_jax.runs.record import CONFIG_FILE, DATA_FILE
from heinsen_jax.training.config import DistillationConfig, ExperimentConfig, OptimizerConfig
from heinsen_jax.typing import config_dataclass

TRANSFER_SUFFIX, FURTHER_SUFFIX, WINDOW_SUFFIX = "-transfer", "-teacher", "-window"
"""Suffixes of the folders of stage 1, of the teacher trained further, and of windows alone."""
SUFFIXES = TRANSFER_SUFFIX, FURTHER_SUFFIX, WINDOW_SUFFIX
FIRST_STAGE, SECOND_STAGE = "stage 1", "linearized"
FURTHER, WINDOW = "teacher trained further", "windows alone"
"""Names of the stages and baselines."""
WINDOW_SIZE = 64
"""Size of these windows, in tokens, unless the new layers have one."""
NO_TEACHER = DistillationConfig()
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
    repeated over the layers, such as 3*gated_deltanet sliding_window."""
    keep: tuple[str, ...] = ()
    """Layers that stay as they are: indices from 0, or slices such as 3::4; or auto:N, for the N
    layers that, if they stay, reduce the divergence from the teacher most."""
    initialization_tokens: int = 4096
    """Tokens of the training text on which new layers are fitted to the teacher's before the first
    update, and layers to keep are chosen; 0 for neither."""
    transfer_steps: int = 0
    """Updates of stage 1."""
    transfer_learning_rate: float = 1e-2
    """Peak learning rate of stage 1."""
    steps: int = 500
    """Updates of stage 2."""
    divergence_weight: float = 0.5
    """Weight of the teacher's predictions in the loss of stage 2."""
    lora_rank: int | None = None
    """In stage 2, train only new parameters and low-rank additions of this rank to the projections
    of attention (LoRA); all parameters when None."""
    baselines: bool = True
    """Train two further models on as many tokens, for the table: the teacher itself, and a model
    with windows in place of the new layers."""
    restart: bool = False
    """Repeat both stages; earlier runs are moved into subfolders."""
    allow_change: bool = False
    """Resume runs although data, settings or the teacher have changed."""


class Stage(NamedTuple):
    """A stage of a linearization, a run in a folder."""

    name: str
    folder: str
    experiment: ExperimentConfig


def name_of(option: str) -> str:
    """The name of an option such as --training.log-every=10, with underscores."""
    return option.partition("=")[0].replace("-", "_")


def check_overrides(overrides: Sequence[str]) -> None:
    """Refuse overrides of fields that differ by stage.

    Raises:
      UserError: an override sets one of these fields.
    """
    for option in overrides:
        name = name_of(option)
        is_own = name.startswith(("__distillation", "__training.steps", "__model"))
        if is_own and name not in COMPUTATION:
            raise UserError(
                f"{option}: differs by stage; give options of this command, such as --steps and "
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
        teacher = replace(teacher, data=replace(teacher.data, **changed))
    return teacher


def plan_stages(
    teacher: ExperimentConfig, options: Options, overrides: Sequence[str]
) -> list[Stage]:
    model = linear_layers(teacher.model, options.attention, options.keep)
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
            "stage 1 out"
        )
    if options.transfer_learning_rate <= 0:
        raise UserError(
            f"--transfer-learning-rate {options.transfer_learning_rate}: must be greater than 0; "
            f"the default is {Options.transfer_learning_rate}"
        )
    base = replace(
        teacher,
        optimizer=replace(teacher.optimizer, warmup_steps=_warmup(teacher, options)),
        training=replace(teacher.training, z_loss=0.0),
    )
    settings = DistillationConfig(
        teacher=options.model,
        divergence_weight=options.divergence_weight,
        initialization_tokens=options.initialization_tokens,
    )

    def experiment(
        model: LanguageModelConfig, steps: int, distillation: DistillationConfig, seed: int = 2
    ) -> ExperimentConfig:
        # other batches than the teacher's, and in stage 1 than in stage 2
        changed = {"model": model, "distillation": distillation, "seed": teacher.seed + seed}
        changed["training"] = replace(base.training, steps=steps)
        return override(replace(base, **changed), overrides)

    stages, steps = [], options.steps
    student = settings if options.lora_rank is None else replace(settings, trained="new")
    tuned = model if options.lora_rank is None else with_lora(model, options.lora_rank)
    if options.transfer_steps and new_parameters(model, teacher.model):
        folder, rate = options.workdir + TRANSFER_SUFFIX, options.transfer_learning_rate
        first = experiment(model, options.transfer_steps, settings, seed=1)
        transfer = attention_transfer(first, options.transfer_steps, rate)
        stages.append(Stage(FIRST_STAGE, folder, transfer))
        student = replace(student, start=folder, initialization_tokens=0)
        steps += options.transfer_steps
    second = experiment(tuned, options.steps, student)
    stages.append(Stage(SECOND_STAGE, options.workdir, second))
    if not options.baselines:
        return stages
    further = experiment(replace(teacher.model, lora_rank=options.lora_rank), steps, NO_TEACHER)
    further = replace(further, training=replace(further.training, start=options.model))
    stages.append(Stage(FURTHER, options.workdir + FURTHER_SUFFIX, further))
    sizes = [size for x in model.mechanisms() if (size := getattr(x, "window_size", None))]
    window = f"sliding_window:window_size={[*sizes, WINDOW_SIZE][0]}"
    alone = linear_layers(teacher.model, window, options.keep)
    if alone != model:
        if options.lora_rank is not None:
            alone, settings = with_lora(alone, options.lora_rank), replace(settings, trained="new")
        stages.append(
            Stage(WINDOW, options.workdir + WINDOW_SUFFIX, experiment(alone, steps, settings))
        )
    return stages


def _warmup(teacher: ExperimentConfig, options: Options) -> int:
    """Warmup steps of stage 2. When it resumes: as recorded, so that it may get more updates.
    Otherwise: as for the teacher, but at most a tenth of the updates of stage 2."""
    with open_run(options.workdir) as run:
        path = run.files / CONFIG_FILE
        if path.exists() and not options.restart:
            return load_config(path).optimizer.warmup_steps
    return min(teacher.optimizer.warmup_steps, options.steps // 10)


def attention_transfer(
    finetuning: ExperimentConfig, steps: int, learning_rate: float = 1e-2
) -> ExperimentConfig:
    """Stage 1 of a linearization: AdamW, without weight decay.

    Args:
      finetuning: stage 2, with its teacher.
      steps: number of updates.
      learning_rate: peak learning rate; it decays to a hundredth.

    Returns:
      The experiment of stage 1, with the data and the architecture of stage 2.
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
