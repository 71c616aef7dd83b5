"""Run a study and write its report.

python -m studies recall [--jobs 2 | --executor ray] [--output DIR]
"""

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast

import studies
from heinsen_jax.errors import UserError, command_line
from heinsen_jax.runtime.arguments import Form, only, parse
from heinsen_jax.runtime.signals import unwind_on_signals
from heinsen_jax.typing import config_dataclass

MAX_JOBS_PER_CORE = 4


@config_dataclass
class Options:
    """Run the unfinished runs of a study, and write its report.

    Each finished run is a line of results.jsonl. The same command resumes an interrupted study.
    """

    study: Annotated[Path, Form(only, is_positional=True)]
    """Name of a study in studies/grids, or a Python file with get_study()."""
    output: Path | None = None
    """Folder of the results; runs/studies/<name of the study> when None."""
    executor: Literal["local", "ray"] = "local"
    """local: processes of this machine; ray: a Ray cluster."""
    jobs: int | None = None
    """Number of concurrent runs on this machine; 1 when None."""
    cpus: float | None = None
    """Number of CPUs per run on a cluster; 1 when None."""
    gpus: float | None = None
    """Number of GPUs per run on a cluster; 0 when None."""
    report_only: bool = False
    """Only write the report of the finished runs."""
    reuse: tuple[Path, ...] = ()
    """Folders of other studies, from which equal runs are copied."""


@command_line
def main() -> int:
    options = parse(Options, prog="python -m studies", description=Options.__doc__)
    is_local, study = options.executor == "local", options.study
    for name in ("cpus", "gpus") if is_local else ("jobs",):
        if (value := getattr(options, name)) is not None:
            raise UserError(
                f"--{name} {value} has no effect with --executor {options.executor}; leave it out"
            )
    jobs = 1 if options.jobs is None else options.jobs
    if jobs < 1:
        raise UserError(f"--jobs {jobs} must be at least 1")
    cores = len(studies.available_cores()) or os.cpu_count() or 1
    if is_local and jobs > MAX_JOBS_PER_CORE * cores:
        raise UserError(
            f"--jobs {jobs}: each is a process of JAX, and this machine has {cores} core(s); "
            f"give at most {MAX_JOBS_PER_CORE * cores}"
        )
    folder = options.output or Path("runs") / "studies" / study.stem
    local = partial(studies.in_processes, jobs=jobs)
    cpus = 1 if options.cpus is None else options.cpus
    gpus = 0 if options.gpus is None else options.gpus
    cluster = partial(studies.on_cluster, cpus=cpus, gpus=gpus)
    execute = local if is_local else cluster
    try:
        with unwind_on_signals():
            studies.run_study(
                studies.load_study(study), folder, execute, options.report_only, options.reuse
            )
    except studies.Stopped:  # a process of a run received the signal to all processes first
        return _stopped(128 + signal.SIGINT)
    except SystemExit as stopped:
        return _stopped(cast(int, stopped.code))
    return 0


def _stopped(code: int) -> int:
    with contextlib.suppress(OSError):  # a closed terminal
        print("\nstopped; to resume, give the same command again")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
