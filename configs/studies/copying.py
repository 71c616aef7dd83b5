"""Who copies a string, and a longer one than it ever saw?

python -m heinsen_jax.study configs/studies/copying.py --jobs 2

Learned at 5 to 20 letters, tested at up to 60 (Jelassi et al., 2024). For two CPU cores
and half an hour.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import load_config
from heinsen_jax.study import Lengths, Study, sweeps

ABOUT = """
Strings of 5 to 20 of 26 letters are learned, and all lengths of the plot tested. A letter counts as
right given those before it. Two layers of width 64, a convolution of 4 tokens before each branch,
no other positions, 800 updates of 64 strings.
"""
TESTED = 10, 20, 30, 40, 60
MECHANISMS = (
    "softmax",
    "sliding_window",
    "rmt",
    "linear",
    "performer",
    "additive",
    "log",
    "log, linear values",
    "log, decay by head",
    "log, decay by feature",
)


def get_study() -> Study:
    base = load_config(Path(__file__).parents[1] / "copying.py")
    known = sweeps.causal_mechanisms(length=64)
    return Study(
        title="Copying strings, and longer ones than were learned",
        about=ABOUT,
        base=replace(
            base,
            data=replace(base.data, test_lengths=TESTED, validation_examples=512),
            training=replace(base.training, evaluate_every=800),
        ),
        axes={
            "mechanism": {name: known[name] for name in MECHANISMS},
            "learning_rate": sweeps.learning_rates(3e-3, 1e-2),
            "seed": sweeps.seeds(0, 1),
        },
        metric="accuracy",
        mode="max",
        extra_metrics=tuple(f"accuracy_{length}" for length in TESTED),
        plots=(Lengths(TESTED),),
    )
