"""Plot of the losses of a run."""

from pathlib import Path

from heinsen_jax.errors import extra_module
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.storage.files import storage_errors

PLOT_FILE = "loss.png"


def plot_losses(workdir: Path) -> Path:
    """Plot training and validation loss into the run's folder."""
    rows = read_metrics(workdir)
    figures = extra_module("matplotlib.figure")  # which takes long
    figure = figures.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, style in (("train/loss", "-"), ("validation/loss", "o-")):
        points = [(row["step"], row[name]) for row in rows if name in row]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, linewidth=1, markersize=4)
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.set_title(workdir.name, parse_math=False)
    axes.grid(alpha=0.3)
    axes.legend()
    with storage_errors(workdir):
        figure.savefig(workdir / PLOT_FILE, dpi=150)
    return workdir / PLOT_FILE
