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

from pathlib import Path
from typing import Annotated

from heinsen_jax import training
from heinsen_jax.config.help import print_help
from heinsen_jax.config.load import load_config
from heinsen_jax.config.override import override
from heinsen_jax.errors import UserError, command_line
from heinsen_jax.runs.record import CONFIG_FILE
from heinsen_jax.runtime import distributed
from heinsen_jax.runtime.allocator import keep_freed_memory
from heinsen_jax.runtime.arguments import Form, options_of, parse, print_options
from heinsen_jax.runtime.signals import exit_immediately
from heinsen_jax.typing import config_dataclass

PROG = "python -m heinsen_jax.train"


@config_dataclass
class Options:
    """Options of the command, besides the fields of the configuration."""

    help: Annotated[str | None, Form(lambda values: " ".join(values))] = None
    """Show this, and with --config the most common fields; or all fields of a section."""
    config: str | None = None
    """Name of a shipped configuration, a Python file, or a run's config.json; required."""
    workdir: str | None = None
    """The run's folder, on a disk or in a bucket, gs://bucket/folder; runs/<name of the
    configuration> when None."""
    restart: bool = False
    """Start at step 1 and move a run in the folder into a subfolder; give it once, not in a command
    that a scheduler repeats."""
    allow_change: bool = False
    """Resume a run although its data, its teacher, or settings that affect its result have
    changed."""
    dry_run: bool = False
    """Compile, time a few updates, and report memory and time; do not train."""
    profile: bool = False
    """Write a trace of a few steps into the run's folder."""
    coordinator: str | None = None
    """host:port of process 0, if no cluster is detected."""
    num_processes: int | None = None
    """Number of processes."""
    process_id: int | None = None
    """Index of this process, from 0."""
    heartbeat_timeout: int = 100
    """Seconds after which a silent process counts as dead and the others exit."""


@command_line
def main() -> int:
    overrides: list[str] = []
    options = parse(Options, prog=PROG, description=__doc__, unknown=overrides)
    if options.help is not None:
        if not options.help:
            print_options(PROG, __doc__, options_of(Options))
        if options.config is not None or options.help:
            print_help(load_config(options.config or "quickstart"), options.help)
        return 0
    if options.config is None:
        raise UserError("--config is missing; give a name, such as quickstart, a file, or --help")
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
        train = training.train  # imports the trainer, before the folder is locked
        prepared = training.prepare_run(
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
