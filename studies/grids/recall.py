"""Associative recall against state size, for every causal mechanism.

python -m studies recall --jobs 2

Needs two hours on two CPU cores: 8 pairs with a vocabulary of 128 at length 64, 800 updates of 32
sequences. Zoology's sizes are in `recall_zoology.py`.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from studies import Points, Study, sweeps

ABOUT = """
Sequences of 64 tokens contain 8 keys with their values, and then query each key once; guessing
among the 8 values has accuracy 1/8. Two layers of each width, a convolution of 4 tokens before each
branch, no position encoding, 800 updates of 32 sequences. Zoology's sizes are in
`studies/grids/recall_zoology.py`. State size is that after 64 tokens, in float32, convolutions
included.
"""


def get_study() -> Study:
    base = load_config("recall")
    return Study(
        title="Associative recall against bytes of state",
        about=ABOUT,
        base=replace(base, training=replace(base.training, evaluate_every=800)),
        axes={
            "mechanism": sweeps.causal_mechanisms(length=64),
            "width": sweeps.widths(32, 64),
            "learning_rate": sweeps.learning_rates(3e-3, 1e-2),
            "seed": sweeps.seeds(0, 1),
        },
        metric="accuracy",
        plots=(Points("accuracy", frontier=True, chance=1 / 8, highlighted=sweeps.COLORS),),
    )
