"""Power laws that are fitted to results of studies."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats


@dataclass(frozen=True)
class Fit:
    """The least-squares fit of log y = log a - b log x, a power law y = a x^(-b).

    Attributes:
      scale: a.
      exponent: b; positive if y decreases.
      interval: 95% confidence interval of b, by Student's t-distribution of its error: it assumes
        that log y deviates from the line independently, with one variance.
    """

    scale: float
    exponent: float
    interval: tuple[float, float]

    def __call__(self, x: float) -> float:
        return self.scale * x**-self.exponent

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.exponent:.4f} [{low:.4f}, {high:.4f}]"


def fit_power_law(x: Sequence[float], y: Sequence[float]) -> Fit | None:
    """Fit a power law to positive values; None for fewer than three points, or a single x.

    Examples:
      >>> fit = fit_power_law([1, 10, 100], [3.0, 0.3, 0.03])
      >>> round(fit.scale, 6), round(fit.exponent, 6)
      (3.0, 1.0)
    """
    if len(x) < 3 or len(set(x)) < 2:
        return None
    (slope, intercept), covariance = np.polyfit(np.log(x), np.log(y), 1, cov=True)
    width = float(stats.t.ppf(0.975, len(x) - 2) * np.sqrt(covariance[0, 0]))
    exponent = -float(slope)
    return Fit(math.exp(intercept), exponent, (exponent - width, exponent + width))
