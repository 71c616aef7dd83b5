"""Run a study and write its report.

python -m studies recall [--jobs 2 | --executor ray] [--output DIR]
"""

import contextlib
import os
import signal
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, cast

import tyro

from heinsen_jax.errors import UserError, command_line
from heinsen_jax.runtime.signals import unwind_on_signals
from studies.grid import load_study
from studies.runner import run_study
from studies.runs import Stopped, available_cores, in_processes, on_cluster

MAX_JOBS_PER_CORE = 4


@command_line
def main() -> int:
    def run(
        study: Annotated[
            tyro.conf.Positional[Path],
            tyro.conf.arg(help="name of a shipped study, or a Python file with get_study()"),
        ],
        output: Annotated[
            Path | None,
            tyro.conf.arg(help="folder of the results; runs/studies/<name of the study> when None"),
        ] = None,
        executor: Annotated[
            Literal["local", "ray"],
            tyro.conf.arg(help="local: processes of this machine; ray: a Ray cluster"),
        ] = "local",
        jobs: Annotated[int, tyro.conf.arg(help="number of concurrent runs on this machine")] = 1,
        cpus: Annotated[float, tyro.conf.arg(help="number of CPUs per run on a cluster")] = 1,
        gpus: Annotated[float, tyro.conf.arg(help="number of GPUs per run on a cluster")] = 0,
        report_only: Annotated[
            bool, tyro.conf.arg(help="only write the report of the finished runs")
        ] = False,
        reuse: Annotated[
            tuple[Path, ...],
            tyro.conf.arg(help="folders of other studies, from which equal runs are copied"),
        ] = (),
    ) -> int:
        """Run the unfinished runs of a study, and write its report.

        Each finished run is a line of results.jsonl. The same command resumes an interrupted study.
        """
        if jobs < 1:
            raise UserError(f"--jobs {jobs} must be at least 1")
        cores = len(available_cores()) or os.cpu_count() or 1
        if executor == "local" and jobs > MAX_JOBS_PER_CORE * cores:
            raise UserError(
                f"--jobs {jobs}: each is a process of JAX, and this machine has {cores} core(s); "
                f"give at most {MAX_JOBS_PER_CORE * cores}"
            )
        folder = output or Path("runs") / "studies" / study.stem
        local = partial(in_processes, jobs=jobs)
        cluster = partial(on_cluster, cpus=cpus, gpus=gpus)
        execute = local if executor == "local" else cluster
        try:
            with unwind_on_signals():
                run_study(load_study(study), folder, execute, report_only, reuse)
        except Stopped:  # a process of a run received the signal to all processes first
            return _stopped(128 + signal.SIGINT)
        except SystemExit as stopped:
            return _stopped(cast(int, stopped.code))
        return 0

    return tyro.cli(run, prog="python -m studies")


def _stopped(code: int) -> int:
    with contextlib.suppress(OSError):  # a closed terminal
        print("\nstopped; to resume, give the same command again")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
