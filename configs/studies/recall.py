"""How much does a state hold? Recall against bytes of state, for every causal mechanism.

python -m heinsen_jax.study configs/studies/recall.py --jobs 2

Small, for two CPU cores and an hour: 8 pairs of a vocabulary of 128 at length 64, in 800
updates of 32 texts. Zoology's own sizes are those of `recall_zoology.py`.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import load_config
from heinsen_jax.study import Points, Study, sweeps

ABOUT = """
Texts of 64 tokens name 8 keys and their values, and then ask for each value once; a guess among the
8 is right once in 8. Two layers of each width, a convolution of 4 tokens before each branch, no
other positions, 800 updates of 32 texts. Small, for two CPU cores: the full size is in
`configs/studies/recall_zoology.py`. The state is that after 64 tokens, in float32, convolutions
included.
"""


def get_study() -> Study:
    base = load_config(Path(__file__).parents[1] / "recall.py")
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
        mode="max",
        plots=(Points("accuracy"),),
    )
