"""Train a language model.

    python -m heinsen_jax.train --config quickstart [--workdir DIR] [--section.field VALUE ...]

A configuration is a Python file, a run's config.json, or the name of a shipped configuration. In a
clone, `python train.py --config configs/quickstart.py` is the same.

The same command resumes a run that was interrupted or killed, also on other devices; with other
data, another seed, optimizer or teacher, only with --allow-change.

Exit codes: 130 after Ctrl-C, 143 after SIGTERM, 129 after a closed terminal, each after saving a
checkpoint; 124 if saving needs longer than --training.shutdown-timeout; 2 after invalid input.
HEINSEN_JAX_TRACEBACK=1 shows tracebacks.

On several hosts run the same command on each: docs/pods.md.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path

import jax

from heinsen_jax import data, distributed
from heinsen_jax.allocator import keep_freed_memory
from heinsen_jax.config import (
    ExperimentConfig,
    check_changes,
    check_folder,
    check_tokenizer,
    check_workdir,
    complete_restart,
    identity,
    load_config,
    override,
    record,
    set_aside,
)
from heinsen_jax.errors import command_line, printable
from heinsen_jax.field_help import print_help
from heinsen_jax.generate import sample
from heinsen_jax.run_folder import opened
from heinsen_jax.training.checkpoint import CONFIG_FILE
from heinsen_jax.training.loop import TrainingResult, train
from heinsen_jax.training.settings import check_settings
from heinsen_jax.training.signals import exit_immediately
from heinsen_jax.typing import JSON


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "-h",
        "--help",
        nargs="?",
        const="",
        metavar="SECTION",
        help="show this, and with --config the most common fields; or all fields of a section",
    )
    parser.add_argument(
        "--config",
        help="name of a shipped configuration, a Python file, or a run's config.json; required",
    )
    parser.add_argument(
        "--workdir",
        help="the run's folder, on a disk or in a bucket, gs://bucket/folder; runs/<name of the "
        "configuration> by default",
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="start at step 1 and move a run in the folder into a subfolder; give it once, not in "
        "a command that a scheduler repeats",
    )
    parser.add_argument(
        "--allow-change",
        action="store_true",
        help="resume a run although its data, its teacher, or settings that affect its result "
        "have changed",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="compile, time a few updates, and report memory and time; do not train",
    )
    parser.add_argument(
        "--profile", action="store_true", help="write a trace of a few steps into the run's folder"
    )
    parser.add_argument("--coordinator", help="host:port of process 0, if no cluster is detected")
    parser.add_argument("--num-processes", type=int, help="number of processes")
    parser.add_argument("--process-id", type=int, help="index of this process, from 0")
    parser.add_argument(
        "--heartbeat-timeout",
        type=int,
        default=100,
        help="seconds after which a silent process counts as dead and the others exit; by "
        "default 100",
    )
    return parser


@command_line
def main() -> int:
    parser = _parser()
    options, overrides = parser.parse_known_args()
    if options.help is not None:
        if not options.help:
            parser.print_help()
        if options.config is not None or options.help:
            print_help(load_config(options.config or "quickstart"), options.help)
        return 0
    if options.config is None:
        parser.error("--config is missing; give a name, such as quickstart, a file, or --help")
    keep_freed_memory()
    distributed.initialize(
        options.coordinator,
        options.num_processes,
        options.process_id,
        heartbeat_timeout=options.heartbeat_timeout,
    )
    with exit_immediately():
        with distributed.together():
            config = override(load_config(options.config), overrides)
        result = run_experiment(
            config,
            options.workdir or Path("runs") / _name(Path(options.config)),
            restart=options.restart,
            allow_change=options.allow_change,
            dry_run=options.dry_run,
            profile=options.profile,
        )
    return 0 if result.signal is None else 128 + result.signal


def run_experiment(
    config: ExperimentConfig,
    workdir: str | Path,
    *,
    restart: bool = False,
    allow_change: bool = False,
    dry_run: bool = False,
    profile: bool = False,
) -> TrainingResult:
    """Train an experiment in a run's folder, from its latest checkpoint, if any; as the command
    line does, whose options these are.

    Raises:
      UserError: settings, data or the content of the folder do not fit together.
    """
    with ExitStack() as held:
        with distributed.together():
            run = held.enter_context(opened(workdir))
            files = run.files
            run.check_writable()
            if jax.process_index() == 0 and not dry_run:
                held.enter_context(run.locked())
                complete_restart(run)
        with distributed.together():
            check_folder(run, restart=restart)
            if not restart:
                check_workdir(files, config)
        distributed.check_shared(run.shared)
        with distributed.process_0_first():
            dataset = data.load(config.data)
        modes: dict[str, JSON] = {
            "--dry-run": dry_run,
            "--profile": profile,
            "--restart": restart,
            "--allow-change": allow_change,
        }
        with distributed.together():
            alike = identity(config, dataset) | modes
        distributed.check_alike(alike)
        with distributed.together():
            check_settings(dataset, config)
        with distributed.process_0_first() as is_first:
            if is_first and not dry_run:
                if restart:
                    set_aside(run)
                check_tokenizer(files, config, dataset)
                if changed := check_changes(files, config, dataset, allowed=allow_change):
                    print(
                        f"changed since the last start: {printable('; '.join(changed))}", flush=True
                    )
        return train(
            run,
            dataset,
            config,
            dry_run=dry_run,
            profile=profile,
            allow_change=allow_change,
            on_start=lambda: record(files, config, dataset),
            sample_fn=sample,
        )


def _name(config: Path) -> str:
    """Default name of a run: the name of its configuration, or of the run it repeats."""
    return config.absolute().parent.name if config.name == CONFIG_FILE else config.stem


if __name__ == "__main__":
    raise SystemExit(main())
