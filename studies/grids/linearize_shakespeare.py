"""Linearization of a softmax model of Shakespeare, with 1% to 100% of its training tokens.

python train.py --config studies/grids/linearize_shakespeare.py \\
    --workdir runs/teachers/shakespeare
python -m studies linearize_shakespeare --jobs 2

Needs about three and a half hours on two CPU cores.
"""

from collections.abc import Mapping

from heinsen_jax.config import ExperimentConfig
from studies import Study, linearization, load_study
from studies.linearization import FROM_SCRATCH, MAIN, MECHANISMS, TRAINED_FURTHER

ABOUT = """
The teacher is softmax attention with rotary positions of the study language_model: 2000 updates of
12 x 64 characters. Loss in nats per character, over the whole validation text.

Learning rates of stage 2 were searched for the teacher itself, from scratch, and for up to 10% of
the tokens; the other rows of 30% and 100%, with kept layers, and with stage 2 only, have a
quarter of the teacher's peak. Rows of 3% have two seeds, but for kept layers, stage 2 only and from
scratch.
"""
COMPARED = "3%", "30%"
"""Fractions of the tokens with which all models are run; the other fractions have only `MAIN`."""
MIDDLE_RATE = "0.00125"
LABELS = {"model": "softmax, rotary", "learning_rate": "0.005", "seed": "1"}


def get_config() -> ExperimentConfig:
    """The teacher."""
    return load_study("language_model").run(LABELS).config


def is_run(labels: Mapping[str, str]) -> bool:
    model, tokens = labels["model"], labels["tokens"]
    if model not in MAIN and tokens not in COMPARED:
        return False
    if labels["seed"] != "11" and not (model in MAIN and tokens == "3%"):
        return False
    is_searched = (
        model == TRAINED_FURTHER
        or model.endswith(FROM_SCRATCH)
        or (model in MECHANISMS and tokens in ("1%", "3%", "10%"))
    )
    return is_searched or labels["learning_rate"] == MIDDLE_RATE


def get_study() -> Study:
    return linearization.study(
        title="Linearization of a model of Shakespeare",
        about=ABOUT,
        teacher=get_config(),
        folder="runs/teachers/shakespeare",
        test_lengths=(256, 1024),
        unit="nats per character",
        select=is_run,
    )
