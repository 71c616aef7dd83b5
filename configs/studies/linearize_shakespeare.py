"""Linearization of a softmax model of Shakespeare, with 1% to 100% of its training tokens.

python train.py --config configs/studies/linearize_shakespeare.py \\
    --workdir runs/teachers/shakespeare
python -m heinsen_jax.study configs/studies/linearize_shakespeare.py --jobs 2
"""

from heinsen_jax.config import ExperimentConfig
from heinsen_jax.study import Study, linearization, load_study

ABOUT = """
The teacher is softmax attention with rotary positions of the study language_model: 2000 updates of
12 x 64 characters. Loss in nats per character, over the whole validation text.
"""
LABELS = {"model": "softmax, rotary", "learning_rate": "0.005", "seed": "1"}


def get_config() -> ExperimentConfig:
    """The teacher."""
    return load_study("language_model").run(LABELS).config


def get_study() -> Study:
    return linearization.study(
        title="Linearization of a model of Shakespeare",
        about=ABOUT,
        teacher=get_config(),
        folder="runs/teachers/shakespeare",
        test_lengths=(256, 1024),
        unit="nats per character",
    )
