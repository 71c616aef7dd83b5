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

from heinsen_jax import data as datasets
from heinsen_jax.config.load import load_config
from heinsen_jax.errors import UserError, explain, printable
from heinsen_jax.linearize.comparison import results_of, table
from heinsen_jax.linearize.layers import choose_layers, kept_layers, number_of
from heinsen_jax.linearize.plan import (
    CHOSEN,
    FIRST_STAGE,
    SECOND_STAGE,
    SUFFIXES,
    Options,
    Stage,
    check_overrides,
    name_of,
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
from heinsen_jax.runtime.compilation import cache_compilations
from heinsen_jax.runtime.environment import environment
from heinsen_jax.storage.buckets import absolute_path, is_remote
from heinsen_jax.storage.files import write_atomically
from heinsen_jax.training.loop import fit_into_memory, train
from heinsen_jax.training.prepare import Prepared, prepare_run
from heinsen_jax.training.program import Program
from heinsen_jax.training.recorded import check_workdir
from heinsen_jax.training.settings import resolve_settings

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
            number = number_of(options.keep)
            try:
                teacher = read_teacher(options, run)
                first = options if number is None else replace(options, keep=())
                stages = plan_stages(teacher, first, overrides)
            except pydantic.ValidationError as error:
                raise UserError(explain(error)) from None
            if number is None:
                _check_folders(stages, restart=options.restart)  # before data are prepared
        if number is not None:
            options = replace(options, keep=_chosen(number, stages, teacher.model, options))
            stages = plan_stages(teacher, options, overrides)
            with distributed.together():
                _check_folders(stages, restart=options.restart)
        with ExitStack() as resources:
            runs = _prepared(stages, options, resources)
            for stage, prepared in zip(stages, runs, strict=True):
                _fit(stage, prepared, overrides, restart=options.restart)
            for prepared in runs:
                prepared.begin()  # once all have been checked
            for stage, prepared in zip(stages, runs, strict=True):
                if jax.process_index() == 0:
                    _print_stage(stage, teacher.model)
                result = train(prepared)
                if result.signal is not None:
                    return 128 + result.signal
        _compare(options, stages, runs[-1])
    return 0


def _chosen(
    number: int, stages: Sequence[Stage], teacher: LanguageModelConfig, options: Options
) -> tuple[str, ...]:
    """The layers to keep, as recorded by a run in the folder, or chosen."""
    (stage,) = (x for x in stages if x.folder == options.workdir)
    recorded: list[list[int]] = []
    with distributed.together(), open_run(options.workdir) as run:
        path = run.files / CONFIG_FILE
        if path.exists() and not options.restart:
            recorded.append(kept_layers(load_config(path).model, teacher))
    if not recorded:
        if not options.initialization_tokens:
            raise UserError(
                f"--keep {' '.join(options.keep)} with --initialization-tokens 0: the choice needs "
                "text; give some"
            )
        cache_compilations(stage.experiment.training.compilation_cache)
        with distributed.process_0_first():
            dataset = datasets.load(stage.experiment.data)
        with distributed.together():
            settings = resolve_settings(stage.experiment, dataset)
        with jax.set_mesh(settings.mesh):
            recorded.append(choose_layers(Program(settings), number))
    (kept,) = recorded
    if jax.process_index() == 0:
        print(f"layers to keep: {', '.join(map(str, kept))}", flush=True)
    return tuple(map(str, kept))


def _fit(stage: Stage, prepared: Prepared, overrides: Sequence[str], *, restart: bool) -> None:
    """Choose microbatches and rematerialization of a run that has not begun, so that it fits into
    memory, unless they are given; of another, as recorded."""
    config, path = prepared.settings.config, prepared.folder.files / CONFIG_FILE
    if any(name_of(option) in CHOSEN for option in overrides):
        return
    if path.exists() and not restart:
        recorded = load_config(path)
        steps = recorded.training.accumulation_steps
        config = replace(
            config,
            model=replace(config.model, remat=recorded.model.remat),
            training=replace(config.training, accumulation_steps=steps),
        )
        prepared.settings = replace(prepared.settings, config=config)
    elif (line := fit_into_memory(prepared)) and jax.process_index() == 0:
        print(f"{stage.name}: {line}", flush=True)


def _with_absolute_paths(options: Options) -> Options:
    model, workdir = absolute_path(options.model), absolute_path(options.workdir)
    for folder in (workdir, *(workdir + suffix for suffix in SUFFIXES)):
        if _resolved(folder) == _resolved(model):
            raise UserError(
                f"--workdir {workdir}: a stage would be written to {folder}, the folder of "
                "--model; give another one"
            )
    return replace(options, model=model, workdir=workdir)


def _prepared(stages: Sequence[Stage], options: Options, resources: ExitStack) -> list[Prepared]:
    """All stages and baselines, before the first is trained."""
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
        record = {"attention": [*options.attention], "keep": [*options.keep]}
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
    before = [stage for stage in stages if stage.name == FIRST_STAGE]
    (workdir,) = (stage.folder for stage in stages if stage.name == SECOND_STAGE)
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
