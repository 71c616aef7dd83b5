"""Studies: a grid of runs and a report of their results.

python -m studies recall [--jobs 2 | --executor ray]
"""

from studies import sweeps
from studies.differences import Difference, adjusted_p_values, differences_of
from studies.grid import Run, Study, load_study
from studies.plots import LengthPlot, Plot, PositionPlot, Ranking, draw
from studies.points import Points
from studies.power_law import PowerLawPlot
from studies.records import Comparison
from studies.results import results_of

__all__ = [
    "Comparison",
    "Difference",
    "LengthPlot",
    "Plot",
    "Points",
    "PositionPlot",
    "PowerLawPlot",
    "Ranking",
    "Run",
    "Study",
    "adjusted_p_values",
    "differences_of",
    "draw",
    "load_study",
    "results_of",
    "sweeps",
]
