"""Copying strings, and longer strings than in training.

python -m heinsen_jax.study configs/studies/copying.py --jobs 2

Trained on 5 to 20 letters, tested on up to 60 (Jelassi et al., 2024). Needs half an hour on two
CPU cores.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import load_config
from heinsen_jax.study import LengthPlot, Study, sweeps

ABOUT = """
Trained on strings of 5 to 20 of 26 letters, tested on all lengths in the plot. Each letter is
predicted given the correct letters before it. Two layers of width 64, a convolution of 4 tokens
before each branch, no position encoding, 800 updates of 64 strings.
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
    "log, slots",
    "fox",
    "mamba2",
    "gated_deltanet",
)


def get_study() -> Study:
    base = load_config(Path(__file__).parents[1] / "copying.py")
    known = sweeps.causal_mechanisms(length=64)
    return Study(
        title="Copying strings, and longer strings than in training",
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
        extra_metrics=tuple(f"accuracy_{length}" for length in TESTED),
        plots=(
            LengthPlot(
                TESTED,
                title="Accuracy per letter; trained on 5 to 20 letters",
                length_unit="letters",
                chance=1 / 26,
                highlighted=sweeps.COLORS,
            ),
        ),
    )
