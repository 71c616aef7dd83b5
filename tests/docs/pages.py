"""Pages of the documentation, and the committed results that they report."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from heinsen_jax.study import Comparison, Difference, differences_of, load_study, results_of

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
README_TEXT = " ".join(README.split())
PAGES = "\n".join([README, *(page.read_text() for page in sorted(ROOT.glob("docs/*.md")))])
PAGES_TEXT = " ".join(PAGES.split())
STUDY_TEXT = " ".join((ROOT / "docs/studies.md").read_text().split())
STUDIES = sorted((ROOT / "benchmarks/results/studies").glob("*"))


def table(name: str) -> list[str]:
    """Rows of the table after the comment `<!-- name -->`, without its head."""
    return PAGES.partition(f"<!-- {name} -->")[2].partition("\n\n")[0].strip().splitlines()[2:]


def read_record(name: str) -> dict:
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())


@cache
def results_of_study(name: str) -> Sequence[Comparison]:
    study = load_study(ROOT / f"configs/studies/{name}.py")
    return results_of(study, ROOT / "benchmarks/results/studies" / name)


def results_by_model(name: str) -> dict[str, Comparison]:
    return {x.compared["model"]: x for x in results_of_study(name)}


def difference(name: str, of: str, baseline: str, metric: str, **where: str) -> Difference:
    """Difference of two labels of a study in a metric, at these labels of its other axes."""
    study = replace(load_study(name), baseline=baseline, metric=metric, extra_metrics=())
    found = [
        x
        for x in differences_of(study, results_of_study(name))
        if of in x.compared.values() and where.items() <= x.compared.items()
    ]
    assert len(found) == 1
    return found[0]


def interval(difference: Difference) -> str:
    """95% confidence interval in words."""
    assert difference.interval is not None
    return "{:.2f} to {:.2f}".format(*difference.interval)


def size_in_words(size: int) -> str:
    units = {"kB": 1e6, "MB": 1e9, "GB": 1e12}
    unit, limit = next(item for item in units.items() if size < item[1])
    return f"{size / limit * 1e3:.{0 if unit == 'kB' else 1}f} {unit}"
