"""Hybrids of log-attention and softmax attention: which layers must be softmax attention?

python -m studies hybrids --jobs 2

Needs about two hours and a half on two CPU cores.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from heinsen_jax.data import Copying, Recall
from heinsen_jax.models import Layers
from studies import Points, Ranking, Study, sweeps
from studies.grid import FieldValue

ABOUT = """
Models with eight layers of width 32, log-attention and softmax attention in different layers, on
two tasks: recall of 8 pairs in 64 tokens, 800 updates of 32 sequences, and copying of 5 to 20
letters, tested on 20 and 40, 800 updates of 64 sequences. Log-attention has decay by head, or
slots. A convolution of 4 tokens before each branch, no position encoding. State size is that after
the training length.
"""
LOG = {"values": "linear", "decay": "head", "max_timescale": 64}
COLORS = {
    "softmax": sweeps.COLORS["softmax"],
    "log": sweeps.COLORS["log, decay by head"],
    "slots": sweeps.COLORS["log, slots"],
}


def patterns() -> dict[str, FieldValue]:
    """Mechanisms of the layers, repeated up to eight."""

    def log(repeats: int) -> Layers:
        return Layers("log", repeats=repeats, options=LOG)

    slots = Layers("log", options=sweeps.SLOTS)
    return {
        "log": log(1),
        "softmax": "softmax",
        "1 of 8 softmax, first": ("softmax", log(7)),
        "1 of 8 softmax, last": (log(7), "softmax"),
        "1 of 4 softmax, first": ("softmax", log(3)),
        "1 of 4 softmax, last": (log(3), "softmax"),
        "1 of 2 softmax, first": ("softmax", log(1)),
        "1 of 2 softmax, last": (log(1), "softmax"),
        "slots": slots,
        "slots, 1 of 8 softmax, last": (replace(slots, repeats=7), "softmax"),
    }


def get_study() -> Study:
    base, copying = load_config("recall"), load_config("copying")
    assert isinstance(base.data, Recall)
    assert isinstance(copying.data, Copying)
    recall = replace(base.data, validation_examples=512)
    strings = replace(copying.data, test_lengths=(20, 40), validation_examples=512)

    return Study(
        title="Hybrids of log-attention and softmax attention",
        about=ABOUT,
        base=replace(
            base,
            model=replace(base.model, model_dim=32, num_layers=8),
            training=replace(base.training, evaluate_every=800),
        ),
        axes={
            "layers": {name: {"model.attention": x} for name, x in patterns().items()},
            "task": {
                "recall": {"data": recall, "model.vocab_size": recall.vocab_size},
                "copying": {"data": strings, "model.vocab_size": strings.vocab_size},
            },
            "learning_rate": sweeps.learning_rates(5e-3, 1e-2),
            "seed": sweeps.seeds(0, 1, 2),
        },
        metric="accuracy",
        extra_metrics=("accuracy_20", "accuracy_40"),
        baseline="softmax",
        plots=(
            Ranking(
                "accuracy",
                title="Recall of 8 pairs",
                where={"task": "recall"},
                chance=1 / 8,
                highlighted=COLORS,
                baseline="softmax",
            ),
            Ranking(
                "accuracy_40",
                title="Copying 40 letters",
                where={"task": "copying"},
                chance=1 / 26,
                highlighted=COLORS,
                baseline="softmax",
            ),
            Points(
                "accuracy",
                title="Recall of 8 pairs",
                lines="layers",
                where={"task": "recall"},
                chance=1 / 8,
                frontier=True,
                highlighted=COLORS,
            ),
        ),
    )
