"""The file of a run's metrics: a row of JSON for each report."""

import warnings
from pathlib import Path

from heinsen_jax.errors import UserError, parse_json
from heinsen_jax.storage.files import write_atomically

METRICS_FILE = "metrics.jsonl"


def read_metrics(workdir: Path) -> list[dict[str, float]]:
    """Read the rows of a run's metrics.jsonl.

    A last line truncated by a killed process is skipped, and so, with a warning, is any other line
    that is not a JSON object of numbers with an integer `step`.
    """
    path = workdir / METRICS_FILE
    rows, damaged = read_lines(path)
    if damaged:
        warnings.warn(f"{describe_damage(path, damaged)}: left out", stacklevel=2)
    return [row for _, row in rows]


def read_evaluations(workdir: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of each evaluation from a run's metrics.jsonl, by step."""
    group, evaluations = "validation/", {}
    for row in read_metrics(workdir):
        metrics = {x.removeprefix(group): row[x] for x in row if x.startswith(group)}
        if metrics:
            evaluations[row["step"]] = metrics
    return evaluations


def read_lines(path: Path) -> tuple[list[tuple[bytes, dict[str, float]]], list[int]]:
    """The valid lines with their rows, and the numbers, from 1, of the damaged lines."""
    rows, damaged = [], []
    try:
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable") from None
    for number, line in enumerate(lines, 1):
        try:
            row = parse_json(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and type(row.get("step")) is int and _are_numbers(row):
            rows.append((line.rstrip(b"\r\n") + b"\n", row))
        elif number < len(lines) or line.endswith(b"\n"):
            damaged.append(number)
    return rows, damaged


def _are_numbers(row: dict[str, object]) -> bool:
    return all(isinstance(x, int | float) for x in row.values())


def keep_lines(path: Path, lines: list[bytes]) -> None:
    """Replace the lines of a file atomically."""
    content = b"".join(lines)
    if not path.exists() or path.read_bytes() != content:
        write_atomically(path, content)


def describe_damage(path: Path, lines: list[int]) -> str:
    return f"{path}: line(s) {', '.join(map(str, lines))} cannot be read"
