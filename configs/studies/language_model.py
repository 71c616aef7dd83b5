"""Log-attention and softmax attention as language models in the same block.

python -m heinsen_jax.study configs/studies/language_model.py --jobs 2

Tiny Shakespeare with nanoGPT's CPU budget, at most 0.85M parameters. Needs an hour on two CPU
cores.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import load_config
from heinsen_jax.study import Ranking, Study, sweeps

ABOUT = """
2000 updates of 12 x 64 characters, the budget of nanoGPT's CPU recipe, for which its README reports
1.88. Loss in nats per character, over the whole validation text: on sequences of 64 characters, as
in training, and on longer sequences of 256 and 1024. All models but the paper's have four layers of
width 128, with an MLP of 512 and a convolution of 4 tokens before each branch. Learned positions
are limited to sequences of 64.
"""
COLORS = {
    "log, decay by head": sweeps.COLORS["log, decay by head"],
    "log, the paper's model": sweeps.COLORS["log"],
    "softmax, rotary": sweeps.COLORS["softmax"],
    "softmax, learned positions": sweeps.COLORS["softmax"],
}


def get_study() -> Study:
    configs = Path(__file__).parents[1]
    base = load_config(configs / "shakespeare_char_decay.py")
    paper = load_config(configs / "shakespeare_char_cpu.py")
    learned_positions = {
        "model.attention": "softmax",
        "model.block": "standard",
        "model.convolution_size": 4,
        "model.positions": "learned",
        "model.max_length": 64,
        "data.test_lengths": (),
    }
    return Study(
        title="Log-attention and softmax attention in the same block",
        about=ABOUT,
        base=replace(
            base,
            training=replace(base.training, log_every=500, evaluate_every=2000, sample_tokens=0),
        ),
        axes={
            "model": {
                "log, decay by head": {},
                "softmax, rotary": {"model.attention": "softmax"},
                "softmax, learned positions": learned_positions,
                "log, the paper's model": {"model": paper.model},
            },
            "learning_rate": sweeps.learning_rates(1e-3, 3e-3, 5e-3),
            "seed": sweeps.seeds(1, 2, 3),
        },
        extra_metrics=("loss_256", "loss_1024"),
        plots=tuple(
            Ranking(
                metric,
                title=f"Validation loss on sequences of {length} characters",
                unit="nats per character",
                highlighted=COLORS,
            )
            for metric, length in (("loss", 64), ("loss_1024", 1024))
        ),
    )
