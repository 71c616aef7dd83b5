"""Language models of Python code: which mechanisms benefit from longer contexts?

python -m studies long_context --jobs 2

Needs about seven hours on two CPU cores.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from studies import LengthPlot, PositionPlot, Ranking, Study, sweeps

ABOUT = """
600 updates of 8 x 512 tokens of the library of Python 3.11, with separate files and tokens of 3
bytes on average, by Muon. Loss in nats per token on the same tokens of the files for validation, in
sequences of 32 to 2048 tokens: shorter ones show how much a model benefits from context, the
longest whether it extrapolates. In the plot by position, a point is the mean from half of its
position to it, in sequences of 2048 tokens; it compares models, not positions, as tokens differ.
All models have four layers of width 128 with a convolution of 4 tokens before each branch, and MLPs
whose width is chosen so that they have 1.05M to 1.07M parameters. In hybrids, softmax attention has
no positions. Windows have rotary positions; `log_window` merges one with log-attention over all
earlier tokens. Keys of Mamba-2, its state size per channel, have 32 numbers like keys of the other
mechanisms, if the name has no other number; 128 were published.
"""
LENGTHS = 32, 128, 512, 2048
BASELINE = "log, decay by head"
COLORS = {
    BASELINE: sweeps.COLORS["log, decay by head"],
    "log, slots": sweeps.COLORS["log, slots"],
    "softmax, rotary": sweeps.COLORS["softmax"],
    "FoX": sweeps.COLORS["FoX"],
    "Gated DeltaNet": sweeps.COLORS["Gated DeltaNet"],
    "alternating log and window of 64": "black",
}


def models() -> sweeps.Sweep:
    window = sweeps.WINDOW
    return sweeps.language_models() | {
        "softmax, ALiBi": sweeps.mechanism("softmax", positions="alibi"),
        "window of 64, rotary": {"model.attention": window},
        "GLA": sweeps.mechanism("gla") | {"model.mlp_dim": 496},
        "window of 64 merged with log": sweeps.mechanism("log_window", positions="rotary")
        | {"model.mlp_dim": 480},
        "alternating log and window of 64": {"model.attention": ("log", window)},
        "alternating Gated DeltaNet and window of 64": {
            "model.attention": ("gated_deltanet", window),
            "model.mlp_dim": 448,
        },
        "3 windows of 64, then softmax": {
            "model.attention": (replace(window, repeats=3), sweeps.SOFTMAX)
        },
        "softmax, then 3 log": {"model.attention": (sweeps.SOFTMAX, sweeps.THREE_LOGS)},
        "log, time constants up to 64": sweeps.mechanism("log", max_timescale=64),
        "Mamba-2, state of 128": sweeps.mechanism("mamba2") | {"model.mlp_dim": 256},
    }


def get_study() -> Study:
    base = load_config("python_code")
    training = replace(base.training, log_every=200, evaluate_every=600, sample_tokens=0)
    optimizer = replace(base.optimizer, name="muon")
    return Study(
        title="Python code: loss and context",
        about=ABOUT,
        base=replace(
            base,
            data=replace(base.data, test_lengths=LENGTHS),
            optimizer=optimizer,
            training=training,
        ),
        axes={
            "model": models(),
            "learning_rate": sweeps.learning_rates(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
            "seed": sweeps.seeds(1, 2, 3),
        },
        search="neighbors",
        extra_metrics=("loss_32", "loss_128", "loss_2048"),
        baseline=BASELINE,
        plots=(
            Ranking(
                "loss_2048",
                title="Loss on sequences of 2048 tokens",
                unit="nats per token",
                highlighted=COLORS,
                baseline=BASELINE,
            ),
            LengthPlot(
                LENGTHS, metric="loss", lines="model", unit="nats per token", highlighted=COLORS
            ),
            PositionPlot(LENGTHS[-1], lines="model", unit="nats per token", highlighted=COLORS),
        ),
    )
