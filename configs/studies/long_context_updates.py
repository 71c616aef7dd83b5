"""Language models of Python code with fewer and with more updates: loss against FLOPs.

python -m heinsen_jax.study configs/studies/long_context_updates.py --jobs 2

Needs an estimated hour on two CPU cores.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.study import Points, Study, load_study, sweeps
from heinsen_jax.study.grid import FieldValue

ABOUT = """
Models of the study long_context with 300, 600 and 1200 updates, each with its own decay of the
learning rate, whose peak is the best of that study for 600 updates. `benchmarks/equal_budgets.py`
compares them at equal FLOPs and at equal time.
"""
LEARNING_RATES = {
    "log, decay by head": 8e-3,
    "softmax, rotary": 8e-3,
    "FoX": 8e-3,
    "Gated DeltaNet": 8e-3,
    "Mamba-2": 8e-3,
    "alternating log and softmax": 8e-3,
}
UPDATES = 300, 600, 1200


def get_study() -> Study:
    same = load_study(Path(__file__).with_name("long_context.py"))
    models: dict[str, dict[str, FieldValue]] = {}
    for label, rate in LEARNING_RATES.items():
        (fields,) = sweeps.learning_rates(rate).values()
        models[label] = {**same.axes["model"][label], **fields}
    colors = {x: color for x, color in same.plots[0].highlighted.items() if x in models}
    return replace(
        same,
        title="Python code: loss and number of updates",
        about=ABOUT,
        axes={
            "model": models,
            "updates": {
                str(updates): {"training.steps": updates, "optimizer.warmup_steps": updates // 10}
                for updates in UPDATES
            },
            "seed": sweeps.seeds(1, 2),
        },
        tuned=(),
        search="grid",
        plots=tuple(
            Points(metric, x="flops", lines="model", unit="nats per token", highlighted=colors)
            for metric in ("loss", "loss_2048")
        ),
    )
