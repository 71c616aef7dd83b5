"""Copying, selective copying and induction, on longer sequences than in training.

python -m studies copying --jobs 2

The copying task follows Jelassi et al. (2024). Needs about four and a half hours on two CPU cores.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from heinsen_jax.data import Induction, SelectiveCopying
from studies import LengthPlot, Study, sweeps
from studies.grid import FieldValue

ABOUT = """
Three tasks, each tested on the lengths in its plot. Copying: trained on strings of 5 to 20 of 26
letters; each letter is predicted given the correct letters before it; 800 updates. Selective
copying: repeat 8 of 14 letters that are mixed with noise, trained on 64 tokens of both; 400
updates. Induction: recall which of 16 tokens followed a special token, trained on 64 tokens; 400
updates. All updates have 64 sequences. Two layers of width 64, a convolution of 4 tokens before
each branch, no position encoding.
"""
STRINGS = 10, 20, 30, 40, 60
INPUTS = 64, 128, 256
SEQUENCES = 64, 256, 1024
MECHANISMS = (
    *sweeps.MECHANISMS,
    *("log, linear values", "log, decay by feature"),
    *("sliding window", "recurrent memory", "Performer", "additive"),
)


def task(data: SelectiveCopying | Induction) -> dict[str, FieldValue]:
    return {"data": data, "model.vocab_size": data.vocab_size, "training.steps": 400}


def get_study() -> Study:
    base = load_config("copying")
    selective = load_config("selective_copying").data
    induction = load_config("induction").data
    assert isinstance(selective, SelectiveCopying)
    assert isinstance(induction, Induction)
    selective = replace(selective, test_lengths=INPUTS, validation_examples=512)
    induction = replace(induction, test_lengths=SEQUENCES, validation_examples=512)
    known = sweeps.causal_mechanisms(length=64)
    plots = (
        ("copying", STRINGS, "letters", "Copying; trained on 5 to 20 letters", 26),
        ("selective copying", INPUTS, "tokens", "Selective copying; trained on 64 tokens", 14),
        ("induction", SEQUENCES, "tokens", "Induction; trained on 64 tokens", 16),
    )
    return Study(
        title="Copying, selective copying and induction",
        about=ABOUT,
        base=replace(
            base,
            data=replace(base.data, test_lengths=STRINGS, validation_examples=512),
            training=replace(base.training, evaluate_every=800),
        ),
        axes={
            "task": {
                "copying": {},
                "selective copying": task(selective),
                "induction": task(induction),
            },
            "mechanism": {name: known[name] for name in MECHANISMS},
            "learning_rate": sweeps.learning_rates(1e-3, 3e-3, 1e-2, 3e-2),
            "seed": sweeps.seeds(0, 1),
        },
        search="neighbors",
        metric="accuracy",
        extra_metrics=tuple(
            f"accuracy_{length}" for length in sorted({*STRINGS, *INPUTS, *SEQUENCES})
        ),
        plots=tuple(
            LengthPlot(
                lengths,
                title=title,
                where={"task": name},
                length_unit=unit,
                chance=1 / choices,
                highlighted=sweeps.COLORS,
            )
            for name, lengths, unit, title, choices in plots
        ),
    )
