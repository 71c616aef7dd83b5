"""Log-attention, softmax attention, hybrids and recent mechanisms as language models.

python -m studies language_model --jobs 2

Tiny Shakespeare with nanoGPT's CPU budget, at most 0.85M parameters. Needs five hours on two CPU
cores.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from studies import Ranking, Study, sweeps
from studies.grid import FieldValue

ABOUT = """
2000 updates of 12 x 64 characters, the budget of nanoGPT's CPU recipe, for which its README reports
1.88. Loss in nats per character, over the whole validation text: on sequences of 64 characters, as
in training, and on longer sequences of 256 and 1024. All models but the paper's have four layers of
width 128, with a convolution of 4 tokens before each branch and an MLP, whose width is chosen so
that all have at most 0.85M parameters. Learned positions are limited to sequences of 64. Hybrids
have softmax attention without positions, or FoX, in one or two of their layers. The optimizer is
Muon, except in the rows named AdamW.
"""
BASELINE = "log, decay by head"
WITH_ADAMW = (
    BASELINE,
    "softmax, rotary",
    "softmax, learned positions",
    "log, the paper's model",
)
SOFTMAX = "softmax, rotary", "softmax, learned positions", "softmax, no positions", "softmax, ALiBi"
COLORS = {
    BASELINE: sweeps.COLORS["log, decay by head"],
    "log, slots": sweeps.COLORS["log, slots"],
    "log, the paper's model": sweeps.COLORS["log"],
    "FoX": sweeps.COLORS["FoX"],
    "Gated DeltaNet": sweeps.COLORS["Gated DeltaNet"],
    **dict.fromkeys(SOFTMAX, sweeps.COLORS["softmax"]),
}


def get_study() -> Study:
    base = load_config("shakespeare_char_decay")
    paper = load_config("shakespeare_char_cpu")
    learned_positions: dict[str, FieldValue] = {
        "model.attention": "softmax",
        "model.block": "standard",
        "model.convolution_size": 4,
        "model.positions": "learned",
        "model.max_length": 64,
        "data.test_lengths": (),
    }
    models = sweeps.language_models() | {
        "log, the paper's model": {"model": paper.model},
        "softmax, learned positions": learned_positions,
        "softmax, no positions": {"model.attention": sweeps.SOFTMAX},
        "softmax, ALiBi": sweeps.mechanism("softmax", positions="alibi"),
        "window of 64, rotary": {"model.attention": sweeps.WINDOW},
        "softmax, then 3 log": {"model.attention": (sweeps.SOFTMAX, sweeps.THREE_LOGS)},
        "dense SSM": sweeps.mechanism("goom_ssm") | {"model.mlp_dim": 384},
        "3 log, then FoX": {"model.attention": (sweeps.THREE_LOGS, "fox")},
    }
    return Study(
        title="Language models of Tiny Shakespeare",
        about=ABOUT,
        base=replace(
            base,
            training=replace(base.training, log_every=500, evaluate_every=2000, sample_tokens=0),
        ),
        axes={
            "model": {
                **{name: fields | {"optimizer.name": "muon"} for name, fields in models.items()},
                **{f"AdamW: {name}": models[name] for name in WITH_ADAMW},
            },
            "learning_rate": sweeps.learning_rates(1e-3, 3e-3, 5e-3, 1e-2, 2e-2, 4e-2),
            "seed": sweeps.seeds(1, 2, 3),
        },
        search="neighbors",
        extra_metrics=("loss_256", "loss_1024"),
        baseline=BASELINE,
        plots=tuple(
            Ranking(
                metric,
                title=f"Validation loss on sequences of {length} characters",
                unit="nats per character",
                highlighted=COLORS,
                baseline=BASELINE,
            )
            for metric, length in (("loss", 64), ("loss_1024", 1024))
        ),
    )
