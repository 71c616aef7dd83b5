"""Tiny Shakespeare with every causal mechanism, in the same block and with the same budget.

python -m studies shakespeare --jobs 2

Half of nanoGPT's CPU budget, in a smaller model. Needs 40 minutes on two CPU cores.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from studies import Points, Ranking, Study, sweeps

ABOUT = """
Three layers of width 96, a convolution of 4 tokens before each branch, no position encoding; 1000
updates of 12 x 64 characters. Loss in nats per character, over the whole validation text.
"""


def get_study() -> Study:
    base = load_config("shakespeare_char_cpu")
    model = replace(
        base.model,
        model_dim=96,
        num_layers=3,
        num_heads=4,
        block="standard",
        convolution_size=4,
        positions="none",
        remat=False,
    )
    return Study(
        title="Tiny Shakespeare, all causal mechanisms",
        about=ABOUT,
        base=replace(
            base,
            model=model,
            training=replace(
                base.training, steps=1000, log_every=200, evaluate_every=1000, sample_tokens=0
            ),
        ),
        axes={
            "mechanism": sweeps.causal_mechanisms(length=64),
            "learning_rate": sweeps.learning_rates(2e-3, 5e-3),
            "seed": sweeps.seeds(0, 1),
        },
        plots=(
            Ranking("loss", unit="nats per character", highlighted=sweeps.COLORS),
            Points("loss", unit="nats per character", highlighted=sweeps.COLORS),
        ),
    )
