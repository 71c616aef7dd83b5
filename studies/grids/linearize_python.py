"""Linearization of a softmax model of Python code, with 1% to 100% of its training tokens.

python train.py --config studies/grids/linearize_python.py --workdir runs/teachers/python
python -m studies linearize_python --jobs 2

Needs about three hours on two CPU cores.
"""

from collections.abc import Mapping

from heinsen_jax.config import ExperimentConfig
from studies import Study, linearization, load_study
from studies.linearization import HYBRIDS, MAIN, MERGED, STAGE_2

ABOUT = """
The teacher is softmax attention with rotary positions of the study long_context: 600 updates of
8 x 512 tokens. Loss in nats per token on the files for validation.

Rows have one seed, and in stage 2 a quarter of the teacher's learning rate.
"""
MODELS = {*MAIN} - {"window of 1 merged with log"}
FRACTIONS = "1%", "10%", "100%"
RATE = "0.004"
OTHERS = [f"{model}, {rest}" for model in ("log, Hedgehog", MERGED) for rest in (*HYBRIDS, STAGE_2)]
"""Models that are run with 10% of the tokens only."""
LABELS = {"model": "softmax, rotary", "learning_rate": "0.016", "seed": "1"}


def get_config() -> ExperimentConfig:
    """The teacher."""
    return load_study("long_context").run(LABELS).config


def is_run(labels: Mapping[str, str]) -> bool:
    return labels["model"] in MODELS or (labels["model"] in OTHERS and labels["tokens"] == "10%")


def get_study() -> Study:
    study = linearization.study(
        title="Linearization of a model of Python code",
        about=ABOUT,
        teacher=get_config(),
        folder="runs/teachers/python",
        test_lengths=(2048,),
        unit="nats per token",
        select=is_run,
    )
    study = study.restricted("tokens", FRACTIONS).restricted("learning_rate", [RATE])
    return study.restricted("seed", ["11"])
