"""Linearization of a softmax model of Python code, with 1% to 100% of its training tokens.

python train.py --config configs/studies/linearize_python.py --workdir runs/teachers/python
python -m heinsen_jax.study configs/studies/linearize_python.py --jobs 2
"""

from heinsen_jax.config import ExperimentConfig
from heinsen_jax.study import Study, linearization, load_study

ABOUT = """
The teacher is softmax attention with rotary positions of the study long_context: 600 updates of
8 x 512 tokens. Loss in nats per token on the files for validation.
"""
LABELS = {"model": "softmax, rotary", "learning_rate": "0.016", "seed": "1"}


def get_config() -> ExperimentConfig:
    """The teacher."""
    return load_study("long_context").run(LABELS).config


def get_study() -> Study:
    return linearization.study(
        title="Linearization of a model of Python code",
        about=ABOUT,
        teacher=get_config(),
        folder="runs/teachers/python",
        test_lengths=(2048,),
        unit="nats per token",
    )
