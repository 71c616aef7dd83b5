"""Log-attention in language models of Python code: which change improves it?

python -m studies code_parts --jobs 2

Needs about an hour and a half on two CPU cores.
"""

from collections.abc import Mapping
from dataclasses import replace

from heinsen_jax.models import Layers
from studies import Points, Ranking, Study, load_study, sweeps
from studies.grid import FieldValue

ABOUT = """
The model "log, decay by head" of the study code_contexts with one change, and an MLP whose width is
chosen for as many parameters, 1.06M. A twentieth of the files chooses the learning rates; losses
are of another twentieth.
"""
BASELINE = "log, decay by head"
WINDOW = sweeps.WINDOW
CONFIRMED = BASELINE, "coupled decay, normalized"
"""With three seeds: the baseline, and the best change of the first seed at as many bytes."""


def log(mlp_dim: int = 512, **options: int | float | str | None) -> dict[str, FieldValue]:
    """Fields of layers of log-attention with other options."""
    layer = Layers("log", options=options) if options else "log"  # as in code_contexts
    return {"model.attention": layer, "model.mlp_dim": mlp_dim}


def changes() -> sweeps.Sweep:
    return {
        BASELINE: log(),
        "no decay": log(decay=None),
        "coupled decay": log(decay="coupled"),
        "coupled decay, normalized": log(decay="coupled", query_key_norm=True),
        "values of 64": log(384, value_depth=64),
        "slots": {
            "model.attention": Layers("log", options=sweeps.SLOTS | {"value_depth": 32}),
            "model.mlp_dim": 576,
        },
        "window of 64, then 3 log": {"model.attention": (WINDOW, sweeps.THREE_LOGS)},
        "3 log, then window of 64": {"model.attention": (sweeps.THREE_LOGS, WINDOW)},
        "normalized queries and keys": log(query_key_norm=True),
        "log-values": log(values="log"),
    }


def is_run(labels: Mapping[str, str]) -> bool:
    return labels["seed"] == "1" or labels["change"] in CONFIRMED


def get_study() -> Study:
    same = load_study("code_contexts")
    colors = {BASELINE: sweeps.COLORS["log, decay by head"]}
    return Study(
        title="Log-attention on Python code, one part changed at a time",
        about=ABOUT,
        base=same.base,
        axes={
            "change": changes(),
            "learning_rate": same.axes["learning_rate"],
            "seed": sweeps.seeds(1, 2, 3),
        },
        select=is_run,
        search="neighbors",
        metric="test_loss",
        selected_by="loss",
        extra_metrics=("test_loss_2048",),
        baseline=BASELINE,
        plots=tuple(
            replace(plot, unit="nats per token", highlighted=colors)
            for plot in (
                Ranking("test_loss", title="Loss after one change", baseline=BASELINE),
                Points("test_loss", lines="change", frontier=True),
            )
        ),
    )
