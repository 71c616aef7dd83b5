"""The main models of the study language_model with five other seeds.

python -m studies language_model_seeds --jobs 2

Needs an hour and a half on two CPU cores.
"""

from dataclasses import replace

from studies import Study, load_study, sweeps

ABOUT = """
The main models of the study language_model, each at the learning rate that was the best there, with
five seeds that did not select it.
"""
RATES = {
    "log, decay by head": "0.005",
    "softmax, rotary": "0.005",
    "softmax, learned positions": "0.003",
    "softmax, ALiBi": "0.005",
    "window of 64, rotary": "0.005",
    "FoX": "0.003",
    "Gated DeltaNet": "0.003",
    "Mamba-2": "0.005",
}
"""The best learning rates by model."""


def get_study() -> Study:
    same = load_study("language_model").restricted("model", [*RATES])
    models, rates = same.axes["model"], same.axes["learning_rate"]
    return replace(
        same,
        title="Language models of Tiny Shakespeare, five other seeds",
        about=ABOUT,
        axes={
            "model": {name: {**models[name], **rates[rate]} for name, rate in RATES.items()},
            "seed": sweeps.seeds(4, 5, 6, 7, 8),
        },
        tuned=(),
        search="grid",
    )
