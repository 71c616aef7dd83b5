"""One concept has one name, the field's: these words have another."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = "heinsen_jax", "benchmarks", "configs", "docs", "notebooks", "tests"
BANNED = {
    r"fading|fades": "decay",
    r"perceptrons?": "MLP",
    r"made-up": "synthetic",
    r"goes on|go on": "continues, resumes",
    r"upon": "on",
    r"whole numbers?": "integer",
    r"mends?|mended": "fix",
    r"lots": "chunks",
    r"anew": "again",
    r"for good": "permanently",
    r"longest_memory": "max_timescale",
    r"remat_keeps": "remat_policy",
    r"report_every": "log_every",
    r"skip_above": "skip_grad_norm_ratio",
    r"most_skipped": "max_consecutive_skips",
    r"stop_within": "shutdown_timeout",
}


def written() -> list[Path]:
    """The files that people read, this one and the history apart."""
    folders = (ROOT / name for name in FOLDERS)
    found = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(x for f in folders for x in f.rglob("*"))]
    names = {"CHANGELOG.md", Path(__file__).name}
    return [x for x in found if x.suffix in (".md", ".py", ".toml") and x.name not in names]


@pytest.mark.parametrize("word", BANNED)
def test_prose_uses_the_terms_of_the_field(word):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in written()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"\b({word})\b", line, re.IGNORECASE)
    ]
    assert not found, f"write {BANNED[word]!r}:\n" + "\n".join(found)
