"""Language models of Python code: which mechanisms benefit from longer contexts?

python -m heinsen_jax.study configs/studies/long_context.py --jobs 2

Needs an estimated five hours on two CPU cores.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import load_config
from heinsen_jax.study import PositionPlot, Ranking, Study, sweeps

ABOUT = """
600 updates of 8 x 512 tokens of the library of Python 3.11, with separate files and tokens of 3
bytes on average, by Muon. Loss in nats per token on the files for validation, on sequences of 512
tokens, as in training, and of 2048; the latter also by position in the file, where later positions
are only in longer files. All models have four layers of width 128 with a convolution of 4 tokens
before each branch, and MLPs whose width is chosen so that they have 1.05M to 1.07M parameters.
Hybrids have softmax attention without positions in one or two of their layers.
"""
BASELINE = "log, decay by head"
COLORS = {
    BASELINE: sweeps.COLORS["log, decay by head"],
    "log, slots": sweeps.COLORS["log, slots"],
    "softmax, rotary": sweeps.COLORS["softmax"],
    "FoX": sweeps.COLORS["fox"],
    "Gated DeltaNet": sweeps.COLORS["gated_deltanet"],
}


def get_study() -> Study:
    base = load_config(Path(__file__).parents[1] / "python_code.py")
    training = replace(base.training, log_every=200, evaluate_every=300, sample_tokens=0)
    optimizer = replace(base.optimizer, name="muon")
    return Study(
        title="Python code: loss and context",
        about=ABOUT,
        base=replace(base, optimizer=optimizer, training=training),
        axes={
            "model": sweeps.language_models()
            | {
                "softmax, ALiBi": sweeps.mechanism("softmax", positions="alibi"),
                "softmax, no positions": sweeps.mechanism("softmax", positions="none"),
                "GLA": sweeps.mechanism("gla") | {"model.mlp_dim": 496},
            },
            "learning_rate": sweeps.learning_rates(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
            "seed": sweeps.seeds(1, 2, 3),
        },
        search="neighbors",
        extra_metrics=("loss_2048", "loss_2048_at_64", "loss_2048_at_2048"),
        baseline=BASELINE,
        plots=(
            Ranking(
                "loss_2048",
                title="Loss on sequences of 2048 tokens",
                unit="nats per token",
                highlighted=COLORS,
                baseline=BASELINE,
            ),
            PositionPlot(2048, lines="model", unit="nats per token", highlighted=COLORS),
        ),
    )
