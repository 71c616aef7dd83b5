"""Prose and names use the terms of the field: these words have a better one."""

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
    r"sees|seen|unseen": "attends to, visible, masked",
    r"pieces?|halves": "chunk, block, part",
    r"room": "capacity, space",
    r"at once": "immediately, in one call",
    r"there (is|are|was|were)": "exists, or a subject and a verb",
    r"nobody|whoever|whom": "the caller, the process",
    r"asked for": "requested",
    r"forgets?|forgot": "decays",
    r"misspelt": "misspelled",
    r"\w*(ormali|ptimi|eriali|nitiali|ummari|aximi|inimi)s(e|ed|es|ing|ation)": "American spelling",
    r"learned(?! position| vector|[\"'`])": "trained",
    r"in turns?": "interleaved, alternating",
    r"\"\"\"(What|Of|Who|Where|How)": "an imperative or a noun phrase",
    r"as can be|need be": "a plain adverb",
    r"longest_memory": "max_timescale",
    r"remat_keeps": "remat_policy",
    r"report_every": "log_every",
    r"skip_above": "skip_grad_norm_ratio",
    r"most_skipped": "max_consecutive_skips",
    r"stop_within": "shutdown_timeout",
}


def written() -> list[Path]:
    """Return the files that people read, except this one."""
    folders = (ROOT / name for name in FOLDERS)
    found = [*ROOT.glob("*.md"), *ROOT.glob("*.toml"), *(x for f in folders for x in f.rglob("*"))]
    return [x for x in found if x.suffix in (".md", ".py", ".toml") and x != Path(__file__)]


@pytest.mark.parametrize("word", BANNED)
def test_prose_uses_the_terms_of_the_field(word):
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in written()
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(rf"(?<!\w)({word})(?!\w)", line, re.IGNORECASE)
    ]
    assert not found, f"write {BANNED[word]!r}:\n" + "\n".join(found)
