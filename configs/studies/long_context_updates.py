"""Language models of Python code with fewer and with more updates: loss against FLOPs and time.

python -m heinsen_jax.study configs/studies/long_context_updates.py --jobs 2

Needs an estimated hour on two CPU cores.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.study import Points, Study, load_study, sweeps
from heinsen_jax.study.grid import FieldValue

ABOUT = """
The models of the study long_context with 300, 600 and 1200 updates, each with its own decay of the
learning rate, whose peak is the best of that study for 600 updates. `benchmarks/equal_budgets.py`
compares them at equal FLOPs and equal training time.
"""
LEARNING_RATES = {
    "log, decay by head": 4e-3,
    "log, slots": 4e-3,
    "softmax, rotary": 4e-3,
    "FoX": 4e-3,
    "Gated DeltaNet": 4e-3,
    "Mamba-2": 4e-3,
    "3 log, then softmax": 4e-3,
    "alternating log and softmax": 4e-3,
    "GLA": 4e-3,
}
UPDATES = 300, 600, 1200


def get_study() -> Study:
    same = load_study(Path(__file__).with_name("long_context.py"))
    models: dict[str, dict[str, FieldValue]] = {}
    for label, rate in LEARNING_RATES.items():
        (fields,) = sweeps.learning_rates(rate).values()
        models[label] = {**same.axes["model"][label], **fields}
    highlighted = same.plots[0].highlighted
    return replace(
        same,
        title="Python code: loss and budget",
        about=ABOUT,
        axes={
            "model": models,
            "updates": {
                str(updates): {"training.steps": updates, "optimizer.warmup_steps": updates // 10}
                for updates in UPDATES
            },
            "seed": sweeps.seeds(1),
        },
        tuned=(),
        search="grid",
        baseline=None,
        plots=tuple(
            Points(metric, x="flops", lines="model", unit="nats per token", highlighted=highlighted)
            for metric in ("loss", "loss_2048")
        ),
    )
