"""Studies: a grid of runs and a report of their results.

python -m heinsen_jax.study configs/studies/recall.py [--jobs 2 | --executor ray]
"""

from heinsen_jax.study import sweeps
from heinsen_jax.study.differences import Difference, adjusted_p_values, differences_of
from heinsen_jax.study.grid import Run, Study, load_study
from heinsen_jax.study.plots import LengthPlot, Plot, PositionPlot, Ranking, draw
from heinsen_jax.study.points import Points
from heinsen_jax.study.power_law import PowerLawPlot
from heinsen_jax.study.records import Comparison
from heinsen_jax.study.results import results_of

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
