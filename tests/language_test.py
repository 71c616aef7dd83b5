"""Prose and names use the terms of the field: these words have a better one."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PATTERNS = (
    *("*.md", "*.toml", "*.yml", ".ci/*", ".github/**/*.yml", "Dockerfile", "scripts/*"),
    *(
        f"{folder}/**/*.{suffix}"
        for folder in (
            "heinsen_jax",
            "studies",
            "benchmarks",
            "configs",
            "docs",
            "notebooks",
            "tests",
        )
        for suffix in ("md", "py", "toml")
    ),
    "train.py",
)
AMERICAN = "normal|optim|serial|material|initial|summar|maxim|minim|util|parallel|general|special"
BANNED = {
    r"fad(e|es|ed|ing)": "decay",
    r"longest memory": "max_timescale",
    r"perceptrons?": "MLP",
    r"made( |-)up": "synthetic",
    r"(go|goes|going|gone|went) on": "continues, resumes",
    r"upon": "on",
    r"whole numbers?": "integer",
    r"mends?|mended": "fix",
    r"lots?": "chunks",
    r"anew": "again",
    r"for good": "permanently",
    r"sees|seen|unseen": "attends to, visible, masked",
    r"pieces?|halves": "chunk, block, part",
    r"by halves": "recursive",
    r"one level": "single-level",
    r"handed on": "carried",
    r"what is kept": "residuals",
    r"what goes backwards?": "cotangents, backward pass",
    r"room": "capacity, space",
    r"at once": "immediately, in one call",
    r"there (is|are|was|were)": "exists, or a subject and a verb",
    r"(is|are) there": "exists, valid",
    r"nobody|whoever|whom": "the caller, the process",
    r"asked for": "requested",
    r"forgets|forgot|forgotten": "decays",
    r"misspelt": "misspelled",
    rf"\w*({AMERICAN})is(e|ed|es|ing|ation)": "American spelling",
    r"labell\w*|modell\w*|cent(re|red|res|ring)|licences?|towards": "American spelling",
    r"learned(?! position| vector|[\"'`])": "trained",
    r"in turns?": "interleaved, alternating",
    r"\"\"\"(What|Of|Who|Where|How)": "an imperative or a noun phrase",
    r"as can be|need be": "a plain adverb",
}
NAMES = {
    "side_by_side": "parallel_scan",
    "safe_range": "no option: tiers are chosen by the inputs",
    "with_room": "ensure_capacity",
    "check_room": "check_capacity",
    "has_room": "has_capacity",
    "widen|widened": "grow, with_capacity",
    "keeps_rows_apart|are_apart": "independent_rows",
    "take_rows": "select_rows",
    "punctual": "with_timeout",
    "rehearse": "time_updates",
    "conduct": "run_study",
    'block="fading"': 'block="decay"',
    "better(?==)": "mode",
    "Agreement|agreement": "DelayedMax, delayed_max",
    "Lot|lot": "Chunk, chunk",
    "remat_keeps": "remat_policy",
    "report_every": "log_every",
    "skip_above": "skip_grad_norm_ratio",
    "most_skipped": "max_consecutive_skips",
    "skipped_in_a_row|in_a_row": "consecutive_skips",
    "usual_norm": "mean_grad_norm",
    "stop_within": "shutdown_timeout",
    "logits_at_once|exit_at_once|at_once": "max_logits, exit_immediately",
    "Harnessed": "HarnessModel",
}
"""Earlier names and what replaced them."""


def files() -> list[Path]:
    """Return the files that people read, except this one."""
    found = {path for pattern in PATTERNS for path in ROOT.glob(pattern)}
    return sorted(path for path in found if path.is_file() and path != Path(__file__))


TEXTS = {path: path.read_text() for path in files()}


def line_of(match: re.Match[str]) -> int:
    return match.string.count("\n", 0, match.start()) + 1


def search(pattern: str, flags: int = 0) -> list[str]:
    """Return the lines in which a pattern begins that is no part of a longer word."""
    whole = re.compile(rf"(?<![A-Za-z0-9])(?:{pattern})(?![A-Za-z0-9])", flags)
    return [
        f"{path.relative_to(ROOT)}:{line_of(match)}: {match[0]!r}"
        for path, text in TEXTS.items()
        for match in whole.finditer(text)
    ]


@pytest.mark.parametrize("words", BANNED)
def test_prose_uses_the_terms_of_the_field(words):
    found = search(words.replace(" ", r"[\s_#]+"), re.IGNORECASE)  # also in names and across lines
    assert not found, f"write {BANNED[words]!r}:\n" + "\n".join(found)


@pytest.mark.parametrize("words", [r"(that|those)[\s_#]+of", r"(found|said|held) ="])
def test_things_are_named(words):
    """Not pointed at, as in "the size is that of the other". Tests have fewer readers."""
    found = [line for line in search(words, re.IGNORECASE) if not line.startswith("tests/")]
    assert not found, "name the thing:\n" + "\n".join(found)


@pytest.mark.parametrize("name", NAMES)
def test_earlier_names_do_not_return(name):
    found = search(name)
    assert not found, f"write {NAMES[name]!r}:\n" + "\n".join(found)


def test_flags_are_spelled_as_help_prints_them():
    flags = search(r"--(model|data|optimizer|training|mesh)\.[a-z0-9-]*_[a-z0-9_]*")
    found = [line for line in flags if not line.startswith("tests/")]
    assert not found, "write hyphens, such as --model.num-layers:\n" + "\n".join(found)
