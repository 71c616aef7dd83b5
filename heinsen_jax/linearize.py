"""Replace softmax attention of a trained model by a mechanism with a state of constant size.

python -m heinsen_jax.linearize --model runs/teacher --workdir runs/linear

Stage 1, attention transfer: each new attention layer is trained to reproduce the output of the
teacher's, given the same inputs; only parameters that the teacher does not have are trained. Stage
2: the whole model is trained to predict the next token and the teacher's predictions. The runs are
in the folders WORKDIR-transfer and WORKDIR; the same command resumes them. A table compares the
teacher and both stages.

Further options set fields of both runs, as for train.py: --training.log-every 10, --mesh.fsdp 8.
`--optimizer` options apply to stage 2 only. On several hosts run the same command on each:
docs/pods.md.
"""

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import pydantic
import tyro
from rich.console import Console

from heinsen_jax import data, distributed
from heinsen_jax.allocator import keep_freed_memory
from heinsen_jax.buckets import absolute_path, is_remote
from heinsen_jax.config import (
    DATA_FILE,
    ExperimentConfig,
    check_folder,
    check_workdir,
    load_config,
    override,
    set_aside,
)
from heinsen_jax.data import DataConfig
from heinsen_jax.data.files import write_atomically
from heinsen_jax.environment import environment
from heinsen_jax.errors import UserError, command_line, explain, printable
from heinsen_jax.linearize_results import Stage, results_of, table
from heinsen_jax.models.conversion import (
    layers_without_positions,
    linear_layers,
    new_parameters,
    unused_parameters,
    with_lora,
)
from heinsen_jax.run_folder import RunFolder, opened
from heinsen_jax.train import run_experiment
from heinsen_jax.training.checkpoint import (
    CONFIG_FILE,
    Checkpoints,
    load_architecture,
)
from heinsen_jax.training.distillation import DistillationConfig
from heinsen_jax.training.loop import check_fits
from heinsen_jax.training.optimizer import OptimizerConfig
from heinsen_jax.training.settings import check_settings
from heinsen_jax.training.signals import exit_immediately

TRANSFER_SUFFIX = "-transfer"
"""Suffix of the folder of stage 1."""
RESULTS_FILE = "linearized.json"
COMPUTATION = {f"__model.{name}" for name in ("dtype", "remat", "no_remat", "remat_policy")}
"""Fields of the model that do not change its architecture."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Replace softmax attention of a trained model by a mechanism with a state of constant size."""

    model: Annotated[str, tyro.conf.arg(help="the teacher: a run's folder, or a model folder")]
    workdir: Annotated[str, tyro.conf.arg(help="folder of the linearized model's run")]
    data: Annotated[
        str | None, tyro.conf.arg(help="text to train on; the teacher's data when None")
    ] = None
    attention: Annotated[
        str, tyro.conf.arg(help="mechanism of the new layers, as mechanism:option=value,...")
    ] = "log_window"
    keep: Annotated[
        tuple[str, ...],
        tyro.conf.arg(help="layers that stay as they are: indices from 0, or slices such as 3::4"),
    ] = ()
    transfer_steps: Annotated[int, tyro.conf.arg(help="updates of stage 1; 0 to leave it out")] = (
        500
    )
    transfer_learning_rate: Annotated[
        float, tyro.conf.arg(help="peak learning rate of stage 1")
    ] = 1e-2
    steps: Annotated[int, tyro.conf.arg(help="updates of stage 2")] = 500
    divergence_weight: Annotated[
        float, tyro.conf.arg(help="weight of the teacher's predictions in the loss of stage 2")
    ] = 0.5
    lora_rank: Annotated[
        int | None,
        tyro.conf.arg(
            help="in stage 2, train only new parameters and low-rank additions of this rank to the "
            "projections of attention (LoRA); all parameters when None"
        ),
    ] = None
    restart: Annotated[
        bool, tyro.conf.arg(help="repeat both stages; earlier runs are moved into subfolders")
    ] = False
    allow_change: Annotated[
        bool, tyro.conf.arg(help="resume runs although data, settings or the teacher have changed")
    ] = False


@dataclass(frozen=True, kw_only=True)
class _Command(Options):
    __doc__ = Options.__doc__

    coordinator: Annotated[
        str | None, tyro.conf.arg(help="host:port of process 0, if no cluster is detected")
    ] = None
    num_processes: Annotated[int | None, tyro.conf.arg(help="number of processes")] = None
    process_id: Annotated[int | None, tyro.conf.arg(help="index of this process, from 0")] = None


@command_line
def main() -> int:
    options, overrides = tyro.cli(
        _Command, prog="python -m heinsen_jax.linearize", return_unknown_args=True
    )
    keep_freed_memory()
    distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    with exit_immediately():
        return linearize(options, overrides)


def linearize(options: Options, overrides: Sequence[str] = ()) -> int:
    """Run both stages, and write and print the table. All processes of a run call it.

    Args:
      options: the options of the command line.
      overrides: further options, `--section.field VALUE`, of both stages.

    Returns:
      The exit code: 0, or 128 plus the number of the signal that stopped a stage.

    Raises:
      UserError: an option is invalid; the teacher has no training text and no `data` is given; or
        a stage does not fit into memory; before any training.
    """
    model, workdir = absolute_path(options.model), absolute_path(options.workdir)
    for folder in (workdir, workdir + TRANSFER_SUFFIX):
        if _resolved(folder) == _resolved(model):
            raise UserError(
                f"--workdir {workdir}: a stage would be written to {folder}, the folder of "
                "--model; give another one"
            )
    options = replace(options, model=model, workdir=workdir)
    with opened(model) as run:  # whose tokenizer prepares the data
        return _linearize(options, overrides, run)


def _linearize(options: Options, overrides: Sequence[str], run: RunFolder) -> int:
    with distributed.together():
        for option in overrides:
            name = option.partition("=")[0].replace("-", "_")
            is_own = name.startswith(("__distillation", "__training.steps", "__model"))
            if is_own and name not in COMPUTATION:
                raise UserError(
                    f"{option}: differs by stage; give options of this command, such as --steps "
                    "and --attention, instead"
                )
        try:
            teacher = _teacher(options, run)
            stages = _stages(teacher, options, overrides)
        except pydantic.ValidationError as error:
            raise UserError(explain(error)) from None
        for _, folder, _ in stages:
            with opened(folder) as own:
                check_folder(own, restart=options.restart)
        if not options.restart:
            _check_start(stages)
    with distributed.process_0_first():
        dataset = data.load(stages[-1].experiment.data)
    with distributed.together():
        for _, _, experiment in stages:
            check_settings(dataset, experiment)
    with distributed.process_0_first() as is_first:
        if is_first and options.restart:  # before stage 1, which may be interrupted
            with opened(options.workdir) as own:
                own.check_writable()
                with own.locked():
                    set_aside(own)
    with opened(options.workdir) as own:  # before stage 1, which may take hours
        if len(stages) > 1 and not (own.files / CONFIG_FILE).exists():
            check_fits(own, dataset, stages[-1].experiment)
    for name, workdir, experiment in stages:
        if is_first:
            pair = experiment.model, teacher.model
            new = _listed(new_parameters(*pair))
            print(f"{name}: {printable(workdir)}; not from the teacher: {new}")
            if lost := layers_without_positions(*pair):
                print(f"without the teacher's position encoding: {', '.join(sorted(lost))}")
            if unused := unused_parameters(*pair):
                print(f"not used, since the new layers have no place for them: {_listed(unused)}")
            sys.stdout.flush()
        changes = {"restart": options.restart, "allow_change": options.allow_change}
        result = run_experiment(experiment, workdir, **changes)
        if result.signal is not None:
            return 128 + result.signal
    results = results_of(options.model, stages, dataset)
    with distributed.together():
        record = {"attention": options.attention, "keep": [*options.keep]}
        record |= {"results": [*map(asdict, results)], "environment": environment()}
        if is_first:
            with opened(options.workdir) as own, own.published():
                text = json.dumps(record, indent=2) + "\n"
                write_atomically(own.files / RESULTS_FILE, text.encode())
            Console().print(table(results))
    return 0


def _resolved(path: str) -> str:
    return path.rstrip("/") if is_remote(path) else str(Path(path).resolve())


def _listed(parameters: Iterable[str]) -> str:
    """Names of parameters within their layer, such as attention.query_features."""
    names = {name.removesuffix(".value").split(".", 2)[2] for name in parameters}
    return ", ".join(sorted(names)) or "nothing"


def _check_start(stages: Sequence[Stage]) -> None:
    """Check that the stages may start or resume in their folders, and that a stage 2 that is
    resumed has started from the end of this stage 1."""
    for _, folder, experiment in stages:
        with opened(folder) as run:
            check_workdir(run.files, experiment)
    *before, (_, workdir, _) = stages
    for _, folder, experiment in before:
        with opened(workdir) as run:
            if not (run.files / CONFIG_FILE).exists():  # stage 2 has not begun
                return
            if load_config(run.files / CONFIG_FILE).distillation.start is None:
                raise UserError(
                    f"--workdir {workdir}: holds another run; give another folder, or --restart, "
                    "which moves that run into a subfolder"
                )
        with opened(folder) as run, Checkpoints(run, read_only=True) as checkpoints:
            step, steps = checkpoints.latest_step(), experiment.training.steps
        if step != steps:
            raise UserError(
                f"--workdir {workdir}: holds a stage 2 of another stage 1; {folder} has "
                f"{step or 0} of {steps} updates; give --restart, or the earlier --transfer-steps"
            )


def _teacher(options: Options, run: RunFolder) -> ExperimentConfig:
    """The teacher's experiment, with the data to train on."""
    load_architecture(options.model)  # its errors say what the folder is
    teacher = load_config(run.files / CONFIG_FILE)
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


def _stages(teacher: ExperimentConfig, options: Options, overrides: Sequence[str]) -> list[Stage]:
    model = linear_layers(teacher.model, options.attention, options.keep)
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
        model=model,
        seed=teacher.seed + 1,  # other batches than those of the teacher
        optimizer=replace(teacher.optimizer, warmup_steps=_warmup(teacher, options)),
        training=replace(teacher.training, steps=options.steps, z_loss=0.0),
    )
    settings = DistillationConfig(
        teacher=options.model, divergence_weight=options.divergence_weight
    )
    finetuning = override(replace(base, distillation=settings), overrides)
    stages = []
    if options.transfer_steps and new_parameters(model, teacher.model):
        folder, rate = options.workdir + TRANSFER_SUFFIX, options.transfer_learning_rate
        transfer = attention_transfer(finetuning, options.transfer_steps, rate)
        stages.append(Stage("stage 1", folder, transfer))
        settings = replace(settings, start=folder)
    if options.lora_rank is not None:
        model = with_lora(finetuning.model, options.lora_rank)
        finetuning, settings = replace(finetuning, model=model), replace(settings, trained="new")
    # other batches than those of stage 1
    finetuning = replace(finetuning, distillation=settings, seed=finetuning.seed + 1)
    return [*stages, Stage("stage 2", options.workdir, finetuning)]


def _warmup(teacher: ExperimentConfig, options: Options) -> int:
    """Updates of warmup of stage 2: the recorded ones when it resumes, so that it may get more
    updates; else the teacher's, but at most a tenth of its own."""
    with opened(options.workdir) as run:
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
    teacher = finetuning.distillation.teacher
    return replace(
        finetuning,
        training=replace(finetuning.training, steps=steps, sample_tokens=0),
        distillation=DistillationConfig(teacher=teacher, target="attention", trained="new"),
        optimizer=OptimizerConfig(
            learning_rate=learning_rate,
            end_learning_rate=learning_rate / 100,
            warmup_steps=steps // 20,
            weight_decay=0.0,
        ),
    )


if __name__ == "__main__":
    raise SystemExit(main())
