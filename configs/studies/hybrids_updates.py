"""Hybrids of log-attention and softmax attention, trained three times as long.

python -m heinsen_jax.study configs/studies/hybrids_updates.py --jobs 2

Needs about 8 minutes on two CPU cores.
"""

from dataclasses import replace

from heinsen_jax.study import Study, load_study, sweeps

ABOUT = """
Models of the study hybrids whose first layer is log-attention with decay by head: do more updates
suffice to learn recall of 8 pairs, in 2400 updates instead of 800?
"""
CHOSEN = "1 of 4 softmax, last", "1 of 2 softmax, last"


def get_study() -> Study:
    hybrids = load_study("hybrids")
    layers, task = hybrids.axes["layers"], hybrids.axes["task"]
    training = replace(hybrids.base.training, steps=2400, evaluate_every=400)
    return Study(
        title="Hybrids and updates",
        about=ABOUT,
        base=replace(hybrids.base, training=training),
        axes={
            "layers": {name: layers[name] for name in CHOSEN},
            "task": {"recall": task["recall"]},
            "learning_rate": sweeps.learning_rates(1e-2),
            "seed": sweeps.seeds(0, 1),
        },
        metric="accuracy",
        reached=("accuracy", 0.9),
    )
