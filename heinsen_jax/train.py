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
from pathlib import Path

from heinsen_jax.config.help import print_help
from heinsen_jax.config.load import load_config
from heinsen_jax.config.override import override
from heinsen_jax.errors import command_line
from heinsen_jax.runs.record import CONFIG_FILE
from heinsen_jax.runtime import distributed
from heinsen_jax.runtime.allocator import keep_freed_memory
from heinsen_jax.runtime.signals import exit_immediately
from heinsen_jax.training.loop import train
from heinsen_jax.training.prepare import prepare_run


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
        prepared = prepare_run(
            config,
            options.workdir or Path("runs") / _name(Path(options.config)),
            restart=options.restart,
            allow_change=options.allow_change,
            dry_run=options.dry_run,
            profile=options.profile,
        )
        result = train(prepared)
    return 0 if result.signal is None else 128 + result.signal


def _name(config: Path) -> str:
    """Default name of a run: the name of its configuration, or of the run it repeats."""
    return config.absolute().parent.name if config.name == CONFIG_FILE else config.stem


if __name__ == "__main__":
    raise SystemExit(main())
