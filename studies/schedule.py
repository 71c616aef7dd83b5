"""The runs that a study needs, given those that are finished."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest

from studies.grid import Run, Study
from studies.results import Recorded, best_of, searched

ALTERNATING = 8
"""Number of comparisons whose runs alternate: concurrent runs seldom compile the same program, and
later ones find it in the cache of compiled functions."""


def schedule(study: Study, recorded: Recorded) -> tuple[list[Run], list[Run]]:
    """The runs with the first seed, and the best of each comparison with the other seeds, as far as
    they follow from the finished runs."""
    first = [searched(study, recorded, runs) for runs in study.groups()]
    others = [run for _, *others in best_of(study, recorded) for run in others]
    return list(_alternating(first)), others


def _alternating(comparisons: Sequence[Sequence[Run]]) -> Iterator[Run]:
    """The first run of each of some comparisons, then the second of each, and so on."""
    for start in range(0, len(comparisons), ALTERNATING):
        for runs in zip_longest(*comparisons[start : start + ALTERNATING]):
            yield from (run for run in runs if run is not None)
