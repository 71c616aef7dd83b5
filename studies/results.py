"""Recorded results of a study, and the selection for its report."""

import json
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from heinsen_jax.errors import UserError, check_regular, parse_json
from heinsen_jax.storage.files import storage_errors, write_atomically
from studies.grid import Run, Study
from studies.records import Comparison, RunRecord, is_larger_better

RESULTS_FILE = "results.jsonl"


class Recorded:
    """Records of a results file, by the fingerprints of runs."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        self._path, self._records = path, {}
        check_regular(path)
        content = path.read_bytes() if path.exists() else b""
        lines = content.splitlines(keepends=True)
        for number, line in enumerate(lines, 1):
            try:
                record = parse_json(line)
                self._records[record["fingerprint"]] = record
            except (ValueError, KeyError, TypeError):
                if line.endswith(b"\n") or number < len(lines):
                    raise UserError(f"{path}, line {number}, is damaged; remove it") from None
                lines = lines[:-1]  # truncated by a killed process
                if not read_only:
                    write_atomically(path, b"".join(lines))
        self._separator = "\n" if lines and not lines[-1].endswith(b"\n") else ""

    def of(self, run: Run) -> RunRecord | None:
        return self._records.get(run.fingerprint)

    def unfinished(self, runs: Sequence[Run], metric: str | None = None) -> list[Run]:
        """The runs without a record, or with one that lacks a metric."""

        def is_finished(record: RunRecord | None) -> bool:
            metrics = (record or {}).get("metrics")
            return record is not None and (metric is None or not metrics or metric in metrics)

        return [run for run in runs if not is_finished(self.of(run))]

    def reuse(self, other: "Recorded", runs: Sequence[Run]) -> None:
        """Add the records of unfinished runs that another file has."""
        for run in self.unfinished(runs):
            if (record := other.of(run)) is not None:
                self.add(run, {**record, "labels": run.labels})

    def add(self, run: Run, record: RunRecord) -> None:
        is_new = run.fingerprint not in self._records
        record = {"labels": run.labels, "fingerprint": run.fingerprint, **record}
        self._records[run.fingerprint] = record
        with storage_errors(self._path.parent):
            if is_new:
                with self._path.open("a") as file:
                    file.write(f"{self._separator}{json.dumps(record)}\n")
            else:
                lines = (f"{json.dumps(record)}\n" for record in self._records.values())
                write_atomically(self._path, "".join(lines).encode())
            self._separator = ""


def best_of(study: Study, recorded: Recorded) -> list[list[Run]]:
    """For each comparison the best finished run with the first seed, followed by its runs with the
    other seeds, unless it diverged."""
    best = [max(runs, key=partial(rank, study, recorded)) for runs in study.groups()]
    return [
        [run, *study.other_seed_runs(run.labels)]
        if "failed" not in (recorded.of(run) or {})
        else [run]
        for run in best
    ]


def rank(study: Study, recorded: Recorded, run: Run) -> tuple[float, float]:
    """The metric that selects runs, negated if smaller is better, and the negated loss, which
    decides between equal metrics, such as accuracies of 1. Both are -inf if the run diverged or is
    unfinished."""
    metrics = (recorded.of(run) or {}).get("metrics", {})
    sign = 1 if is_larger_better(study.selection_metric) else -1
    values = sign * metrics.get(study.selection_metric, math.nan), -metrics.get("loss", math.nan)
    best, other = (x if math.isfinite(x) else -math.inf for x in values)
    return best, other


def searched(study: Study, recorded: Recorded, runs: Sequence[Run]) -> Sequence[Run]:
    """The runs of a comparison, in the order of the tuned axis, that its search needs."""
    if study.search == "grid":
        return runs
    ranks = {
        place: rank(study, recorded, run)
        for place, run in enumerate(runs)
        if recorded.of(run) is not None
    }
    middle = len(runs) // 2
    if not ranks:
        centers = [middle]
    elif max(ranks.values())[0] == -math.inf:  # all diverged: better ones may be on either side
        centers = [*ranks]
    else:
        centers = [max(ranks, key=lambda place: ranks[place])]
    near = _near(centers, len(runs))
    if middle not in ranks and near - ranks.keys():  # interrupted, or begun on other labels
        near = _near([middle], len(runs))
    return [run for place, run in enumerate(runs) if place in ranks or place in near]


def _near(centers: Sequence[int], number: int) -> set[int]:
    """The places of some labels and of their neighbors, of a number of labels."""
    return {x for center in centers for x in range(center - 1, center + 2) if 0 <= x < number}


def results_of(study: Study, output: Path) -> list[Comparison]:
    """Results of a study: the best run of each comparison, with its finished seeds. Comparisons are
    left out until all their runs with the first seed are finished.

    Raises:
      UserError: no comparison is finished.
    """
    recorded = Recorded(output / RESULTS_FILE, read_only=True)
    results = [
        _result(study, best, recorded)
        for runs, best in zip(study.groups(), best_of(study, recorded), strict=True)
        if not recorded.unfinished(searched(study, recorded, runs))
    ]
    if results:
        return results
    raise UserError(f"{output / RESULTS_FILE}: nothing to report yet; finish the study")


def _result(study: Study, runs: Sequence[Run], recorded: Recorded) -> Comparison:
    labels = runs[0].labels
    tuned = {axis: labels[axis] for axis in study.tuned if axis in labels}
    records = [record for run in runs if (record := recorded.of(run)) is not None]
    return Comparison(study.compared(labels), tuned, records)
