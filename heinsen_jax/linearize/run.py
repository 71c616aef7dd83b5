"""Running a linearization and its baselines."""

import json
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace

import jax
import pydantic
from rich.console import Console

from heinsen_jax import data as datasets
from heinsen_jax.config.load import load_config
from heinsen_jax.errors import UserError, explain, printable
from heinsen_jax.linearize.comparison import results_of, table
from heinsen_jax.linearize.layers import AUTO, choose_layers, kept_layers, number_of
from heinsen_jax.linearize.plan import (
    LINEARIZED,
    SUFFIXES,
    TRANSFER,
    Options,
    Stage,
    are_microbatches_given,
    check_options,
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
from heinsen_jax.storage.buckets import absolute_path, resolved_path
from heinsen_jax.storage.files import write_atomically
from heinsen_jax.training.loop import fit_into_memory, train
from heinsen_jax.training.prepare import Prepared, prepare_run
from heinsen_jax.training.program import Program
from heinsen_jax.training.recorded import check_workdir
from heinsen_jax.training.settings import resolve_settings

RESULTS_FILE = "linearized.json"


def linearize(options: Options, overrides: Sequence[str] = ()) -> int:
    """Run a linearization and its baselines, and write and print the table. All processes of a run
    call it.

    Args:
      options: the options of the command line.
      overrides: further options, `--section.field VALUE`, of all runs.

    Returns:
      The exit code: 0, or 128 plus the number of the signal that stopped a stage.

    Raises:
      UserError: an option is invalid; the teacher has no training text and no `data` is given; or
        a run does not fit into memory; before any training.

    Examples:
      Windows with sinks, in all layers but every fifth:

          attention = ("sliding_window:window_size=60,num_sinks=4",)
          folders = {"model": "runs/teacher", "workdir": "runs/linear"}
          linearize(Options(**folders, attention=attention, keep=("4::5",)))
    """
    options = _with_absolute_paths(options)
    with open_run(options.model) as run:  # its tokenizer prepares the data
        with distributed.together():
            check_overrides(overrides)
            number = number_of(options.keep)
            first = options
            if number is not None:  # the model is compared as it is before its training
                first = replace(options, keep=(), transfer_steps=0, baselines=False)
            try:
                teacher = read_teacher(options, run)
                check_options(options)
                stages = plan_stages(teacher, first, overrides)
            except pydantic.ValidationError as error:
                raise UserError(explain(error)) from None
        if number is not None:
            options = replace(options, keep=_chosen(number, stages[0], teacher.model, options))
        with distributed.together():
            if number is not None:
                stages = plan_stages(teacher, options, overrides)
            _check_folders(stages, restart=options.restart)  # before data are prepared
            stages = [_as_recorded(stage, overrides, restart=options.restart) for stage in stages]
        is_given = any(name_of(option) == "__data.documents" for option in overrides)
        pair = (getattr(x.data, "documents", None) for x in (stages[0].experiment, teacher))
        if len({*pair}) > 1 and not is_given and jax.process_index() == 0:
            print("documents: continuous in all runs, since a model does not support segments")
        with ExitStack() as resources:
            runs = _prepared(stages, options, resources)
            for stage, prepared in zip(stages, runs, strict=True):
                _fit(stage, prepared, overrides)
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
    number: int, stage: Stage, teacher: LanguageModelConfig, options: Options
) -> tuple[str, ...]:
    """The layers to keep, as recorded by a run in the folder, or chosen.

    Args:
      number: their number.
      stage: the run with all layers replaced.
      teacher: the teacher's architecture.
      options: the options of the command.
    """
    config, recorded = stage.experiment, None
    with distributed.together(), open_run(options.workdir) as run:
        path = run.files / CONFIG_FILE
        if path.exists() and not options.restart:
            fixed = kept_layers(config.model, teacher)
            kept = kept_layers(load_config(path).model, teacher)
            recorded = [layer for layer in kept if layer not in fixed]
            if len(recorded) != number:
                raise UserError(
                    f"--keep {AUTO}{number}: {options.workdir} holds a run that keeps "
                    f"{len(recorded)} layers; give that number, another folder, or --restart"
                )
    if recorded is None:
        if not options.initialization_tokens:
            raise UserError(
                f"--keep {AUTO}{number} with --initialization-tokens 0: the choice needs text; "
                "give some"
            )
        cache_compilations(config.training.compilation_cache)
        with distributed.process_0_first():
            dataset = datasets.load(config.data)
        with distributed.together():
            settings = resolve_settings(config, dataset)
        with jax.set_mesh(settings.mesh):
            recorded = choose_layers(Program(settings), number)
    if jax.process_index() == 0:
        print(f"layers to keep: {', '.join(map(str, recorded))}", flush=True)
    return tuple(map(str, recorded))


def _as_recorded(stage: Stage, overrides: Sequence[str], *, restart: bool) -> Stage:
    """A stage with the microbatches and rematerialization of the run in its folder, if any, unless
    they are given or the batch has another size."""
    if restart or are_microbatches_given(overrides):
        return stage
    with open_run(stage.folder) as run:
        path = run.files / CONFIG_FILE
        recorded = load_config(path) if path.exists() else None
    config = stage.experiment
    if recorded is None or recorded.data.batch_size != config.data.batch_size:
        return stage
    steps = recorded.training.accumulation_steps
    model = replace(config.model, remat=recorded.model.remat)
    training = replace(config.training, accumulation_steps=steps)
    return stage._replace(experiment=replace(config, model=model, training=training))


def _fit(stage: Stage, prepared: Prepared, overrides: Sequence[str]) -> None:
    """Check that a run that has not begun fits into memory, with other microbatches and
    rematerialization if they are not given."""
    if (prepared.folder.files / CONFIG_FILE).exists() and not prepared.modes.restart:
        return
    may_change = not are_microbatches_given(overrides)
    line = fit_into_memory(prepared, may_change=may_change)
    if line and jax.process_index() == 0:
        print(f"{stage.name}: {line}", flush=True)


def _with_absolute_paths(options: Options) -> Options:
    model, workdir = absolute_path(options.model), absolute_path(options.workdir)
    for folder in (workdir, *(workdir + suffix for suffix in SUFFIXES)):
        if resolved_path(folder) == resolved_path(model):
            raise UserError(
                f"--workdir {workdir}: a run would be written to {folder}, the folder of "
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
    """Compare the teacher and the runs; write and print the table."""
    results = results_of(options.model, stages, last.settings)
    with distributed.together():
        record = {"attention": [*options.attention], "keep": [*options.keep]}
        record |= {"results": [*map(asdict, results)], "environment": environment()}
        if jax.process_index() == 0:
            with open_run(options.workdir) as folder, folder.published():
                text = json.dumps(record, indent=2) + "\n"
                write_atomically(folder.files / RESULTS_FILE, text.encode())
            Console().print(table(results))


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
    """Check that distillation that is resumed has started from the end of this attention
    transfer."""
    before = [stage for stage in stages if stage.name == TRANSFER]
    (workdir,) = (stage.folder for stage in stages if stage.name == LINEARIZED)
    for _, folder, experiment in before:
        with open_run(workdir) as run:
            if not (run.files / CONFIG_FILE).exists():  # distillation has not begun
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
                f"--workdir {workdir}: holds a run after another attention transfer; {folder} has "
                f"{step or 0} of {steps} updates; give --restart, or the earlier --transfer-steps"
            )
