"""State tracking: parity, addition modulo 5, and permutations of five items.

python -m studies state_tracking --jobs 2

Needs about two hours on two CPU cores.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from heinsen_jax.data import StateTracking
from studies import LengthPlot, Study, sweeps
from studies.grid import FieldValue

ABOUT = """
After each element of a group, the product of all elements so far: parity of bits, sums modulo 5,
and products of permutations of five items, of which tokens are a transposition, a cycle and the
identity. Trained on sequences of 32 elements, tested on all lengths in the plots. Two layers of
width 64 with a convolution of 4 tokens before each branch, no position encoding; 300, 600 and 1200
updates of 64 sequences.
"""
LENGTHS = 32, 64, 128, 256
STEPS = {"parity": 300, "modulo 5": 600, "permutations": 1200}
CHOICES = {"parity": 2, "modulo 5": 5, "permutations": 120}
COLORS = {
    "log": sweeps.COLORS["log"],
    "log, slots": sweeps.COLORS["log, slots"],
    "softmax": sweeps.COLORS["softmax"],
    "DeltaNet, negative eigenvalues": "C2",
    "Gated DeltaNet, negative eigenvalues": sweeps.COLORS["Gated DeltaNet"],
    "dense SSM": "C5",
}


def group(data: StateTracking, steps: int) -> dict[str, FieldValue]:
    return {"data": data, "model.vocab_size": data.vocab_size, "training.steps": steps}


def get_study() -> Study:
    base = load_config("state_tracking")
    assert isinstance(base.data, StateTracking)
    data = replace(base.data, test_lengths=LENGTHS, validation_examples=256)
    groups = {
        "parity": data,
        "modulo 5": replace(data, group="modular"),
        "permutations": replace(data, group="s5", generators=True),
    }
    known = sweeps.causal_mechanisms(length=64)
    return Study(
        title="State tracking",
        about=ABOUT,
        base=replace(base, training=replace(base.training, evaluate_every=2000)),
        axes={
            "mechanism": {
                **{name: known[name] for name in sweeps.MECHANISMS},
                **{
                    f"{sweeps.NAMES[name]}, negative eigenvalues": sweeps.mechanism(
                        name, negative_eigenvalues=True
                    )
                    for name in ("deltanet", "gated_deltanet", "kda")
                },
                "dense SSM": sweeps.mechanism("goom_ssm"),
            },
            "group": {name: group(groups[name], STEPS[name]) for name in groups},
            "learning_rate": sweeps.learning_rates(1e-3, 3e-3, 1e-2, 3e-2),
            "seed": sweeps.seeds(0, 1),
        },
        search="neighbors",
        metric="accuracy",
        extra_metrics=tuple(f"accuracy_{length}" for length in LENGTHS[1:]),
        plots=tuple(
            LengthPlot(
                LENGTHS,
                title=name,
                where={"group": name},
                chance=1 / CHOICES[name],
                highlighted=COLORS,
            )
            for name in groups
        ),
    )
