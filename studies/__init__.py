"""Studies: a grid of runs and a report of their results.

python -m studies recall [--jobs 2 | --executor ray]

Names are imported at first use: options are checked before plots and the trainer are imported.
"""

from typing import TYPE_CHECKING

from heinsen_jax.runtime.lazy import attributes

if TYPE_CHECKING:
    from studies.differences import Difference, adjusted_p_values, differences_of
    from studies.grid import Run, Study, load_study
    from studies.plots import LengthPlot, Plot, PositionPlot, Ranking, draw
    from studies.points import Points
    from studies.power_law import PowerLawPlot
    from studies.records import Comparison
    from studies.results import results_of
    from studies.runner import run_study
    from studies.runs import Stopped, available_cores, in_processes, on_cluster

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
    "Stopped",
    "Study",
    "adjusted_p_values",
    "available_cores",
    "differences_of",
    "draw",
    "in_processes",
    "load_study",
    "on_cluster",
    "results_of",
    "run_study",
]

MODULES = (
    "records",
    "results",
    "grid",
    "plots",
    "points",
    "power_law",
    "differences",
    "runs",
    "runner",
)

__getattr__ = attributes(__name__, __all__, MODULES)
