"""Running both stages of a linearization."""

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import jax
import pydantic
from rich.console import Console

from heinsen_jax.config.load import load_config
from heinsen_jax.errors import UserError, explain, printable
from heinsen_jax.linearize.comparison import results_of, table
from heinsen_jax.linearize.plan import (
    TRANSFER_SUFFIX,
    Options,
    Stage,
    check_overrides,
    plan_stages,
    read_teacher,
)
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.models.conversion import (
    layers_without_positions,
    new_parameters,
    unused_parameters,
)
from heinsen_jax.runs.checkpoints import CheckpointReader
from heinsen_jax.runs.folder import check_folder, open_run
from heinsen_jax.runs.record import CONFIG_FILE
from heinsen_jax.runtime import distributed
from heinsen_jax.runtime.environment import environment
from heinsen_jax.storage.buckets import absolute_path, is_remote
from heinsen_jax.storage.files import write_atomically
from heinsen_jax.training.loop import check_fits, train
from heinsen_jax.training.prepare import Prepared, prepare_run
from heinsen_jax.training.recorded import check_workdir

RESULTS_FILE = "linearized.json"


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
    options = _with_absolute_paths(options)
    with open_run(options.model) as run:  # its tokenizer prepares the data
        with distributed.together():
            check_overrides(overrides)
            try:
                teacher = read_teacher(options, run)
                stages = plan_stages(teacher, options, overrides)
            except pydantic.ValidationError as error:
                raise UserError(explain(error)) from None
            _check_folders(stages, restart=options.restart)  # before data are prepared
        with ExitStack() as resources:
            runs = _prepared(stages, options, resources)
            is_new = options.restart or not (runs[-1].folder.files / CONFIG_FILE).exists()
            if len(runs) > 1 and is_new:
                check_fits(runs[-1])  # before stage 1, which may take hours
            for prepared in runs:
                prepared.begin()  # once both stages have been checked
            for stage, prepared in zip(stages, runs, strict=True):
                if jax.process_index() == 0:
                    _print_stage(stage, teacher.model)
                result = train(prepared)
                if result.signal is not None:
                    return 128 + result.signal
        _compare(options, stages, runs[-1])
    return 0


def _with_absolute_paths(options: Options) -> Options:
    model, workdir = absolute_path(options.model), absolute_path(options.workdir)
    for folder in (workdir, workdir + TRANSFER_SUFFIX):
        if _resolved(folder) == _resolved(model):
            raise UserError(
                f"--workdir {workdir}: a stage would be written to {folder}, the folder of "
                "--model; give another one"
            )
    return replace(options, model=model, workdir=workdir)


def _prepared(stages: Sequence[Stage], options: Options, resources: ExitStack) -> list[Prepared]:
    """All stages, before the first is trained."""
    runs: list[Prepared] = []
    for stage in stages:
        prepared = prepare_run(
            stage.experiment,
            stage.folder,
            dataset=runs[0].settings.dataset if runs else None,
            restart=options.restart,
            allow_change=options.allow_change,
        )
        runs.append(resources.enter_context(prepared))
    return runs


def _print_stage(stage: Stage, teacher: LanguageModelConfig) -> None:
    pair = stage.experiment.model, teacher
    new = _listed(new_parameters(*pair))
    print(f"{stage.name}: {printable(stage.folder)}; not from the teacher: {new}")
    if lost := layers_without_positions(*pair):
        print(f"without the teacher's position encoding: {', '.join(sorted(lost))}")
    if unused := unused_parameters(*pair):
        print(f"not used, since the new layers have no place for them: {_listed(unused)}")
    sys.stdout.flush()


def _compare(options: Options, stages: Sequence[Stage], last: Prepared) -> None:
    """Compare the teacher and the stages; write and print the table."""
    results = results_of(options.model, stages, last.settings)
    with distributed.together():
        record = {"attention": options.attention, "keep": [*options.keep]}
        record |= {"results": [*map(asdict, results)], "environment": environment()}
        if jax.process_index() == 0:
            with open_run(options.workdir) as folder, folder.published():
                text = json.dumps(record, indent=2) + "\n"
                write_atomically(folder.files / RESULTS_FILE, text.encode())
            Console().print(table(results))


def _resolved(path: str) -> str:
    return path.rstrip("/") if is_remote(path) else str(Path(path).resolve())


def _listed(parameters: Iterable[str]) -> str:
    """Names of parameters within their layer, such as attention.query_features."""
    names = {name.removesuffix(".value").split(".", 2)[2] for name in parameters}
    return ", ".join(sorted(names)) or "nothing"


def _check_folders(stages: Sequence[Stage], *, restart: bool) -> None:
    """Check that the stages may start or resume in their folders."""
    for stage in stages:
        with open_run(stage.folder) as run:
            check_folder(run, restart=restart)
            if not restart:
                check_workdir(run.files, stage.experiment)
    if not restart:
        _check_order(stages)


def _check_order(stages: Sequence[Stage]) -> None:
    """Check that a stage 2 that is resumed has started from the end of this stage 1."""
    *before, (_, workdir, _) = stages
    for _, folder, experiment in before:
        with open_run(workdir) as run:
            if not (run.files / CONFIG_FILE).exists():  # stage 2 has not begun
                return
            if load_config(run.files / CONFIG_FILE).distillation.start is None:
                raise UserError(
                    f"--workdir {workdir}: holds another run; give another folder, or --restart, "
                    "which moves that run into a subfolder"
                )
        with open_run(folder) as run:
            step, steps = CheckpointReader(run).latest_step(), experiment.training.steps
        if step != steps:
            raise UserError(
                f"--workdir {workdir}: holds a stage 2 of another stage 1; {folder} has "
                f"{step or 0} of {steps} updates; give --restart, or the earlier --transfer-steps"
            )
