"""Associative recall of 4 to 64 pairs against bytes of state.

python -m studies recall_capacity --jobs 2

Needs about six hours on two CPU cores.
"""

from dataclasses import replace
from typing import cast

from heinsen_jax.config import load_config
from heinsen_jax.models import Layers
from studies import Points, Study, sweeps
from studies.grid import FieldValue

ABOUT = """
Sequences of 256 tokens contain 4, 8, 16, 32 or 64 keys with their values, and then query each key
once. One model is trained on all numbers of pairs, and tested on each. Half of the sequences in
training query the keys again, as often as the sequence has places, as most models do not learn the
task in so few updates otherwise. Two layers of width 64 with two heads, a convolution of 4 tokens
before each branch, no position encoding, 1000 updates of 16 sequences by Muon: 60,000 to 137,000
parameters. State size is that after 256 tokens, in float32, convolutions included. `64 slots` and
so on have one head, product features, decay that is coupled to keys, and values of 16 numbers;
`16 x 16` are the sizes of keys and values of both heads; `state of 32` is the size of Mamba-2's
keys, which are 128 by default. With two heads, Gated DeltaNet has keys of 24 and values of 48
numbers, with one head twice as many. In hybrids, softmax attention has no positions, or ALiBi, and
log-attention has values of any sign. The learning rate is selected by the accuracy on sequences as
in training.
"""
PAIRS = 4, 8, 16, 32, 64
NUMBERS = 8, 12, 16
"""Square roots of the numbers of slots."""
LOG = "log, decay by head"
SLOTS = [f"log, {number**2} slots" for number in NUMBERS]
COLORS = {name: sweeps.COLORS[name] for name in ("softmax", "log", "FoX", "Gated DeltaNet")}
COLORS |= dict.fromkeys(SLOTS, sweeps.COLORS["log, slots"])
MECHANISMS = (
    *(name for name in sweeps.MECHANISMS if name != "log, slots"),
    *("softmax, one key/value head", "window merged with log"),
    *("RetNet", "HGRN2", "Taylor", "Performer"),
)


def slots(number: int) -> dict[str, FieldValue]:
    """Log-attention with number^2 slots of 16 values."""
    options = {"key_depth": 2 * number, "value_depth": 16}
    return {"model.attention": Layers("log", options=sweeps.SLOTS | options), "model.num_heads": 1}


def hybrids(log: Layers) -> sweeps.Sweep:
    """Softmax attention in one of the two layers."""
    softmax, alibi = Layers("softmax"), Layers("softmax", options={"positions": "alibi"})
    first = {
        LOG: log,
        "Gated DeltaNet": Layers("gated_deltanet"),
        "Kimi Delta Attention": Layers("kda"),
        "Mamba-2, state of 32": Layers("mamba2", options={"key_depth": 32}),
        "window of 16": Layers("sliding_window", options={"window_size": 16}),
    }
    pairs = {f"{name}, then softmax": (layer, softmax) for name, layer in first.items()}
    for name in (LOG, "Gated DeltaNet"):
        pairs[f"{name}, then softmax with ALiBi"] = first[name], alibi
    pairs["softmax, then log"] = softmax, Layers("log", options={"values": "linear"})
    return {name: {"model.attention": pair} for name, pair in pairs.items()}


def get_study() -> Study:
    base = load_config("recall")
    known = sweeps.causal_mechanisms(length=256)
    data = replace(
        base.data,
        vocab_size=256,
        sequence_length=256,
        min_pairs=PAIRS[0],
        num_pairs=PAIRS[-1],
        repeated_fraction=0.5,
        test_pairs=PAIRS,
        batch_size=16,
        validation_examples=128,
    )
    return Study(
        title="Capacity of recall against bytes of state",
        about=ABOUT,
        base=replace(
            base,
            data=data,
            model=replace(base.model, vocab_size=256),
            optimizer=replace(base.optimizer, name="muon"),
            training=replace(base.training, steps=1000, evaluate_every=200),
        ),
        axes={
            "mechanism": {
                **dict(zip(SLOTS, map(slots, NUMBERS), strict=True)),
                **{name: known[name] for name in MECHANISMS},
                **{
                    f"{sweeps.NAMES[name]}, 16 x 16": sweeps.mechanism(
                        name, key_depth=16, value_depth=16
                    )
                    for name in ("deltanet", "gated_deltanet", "kda")
                },
                "Mamba-2, state of 32": sweeps.mechanism("mamba2", key_depth=32),
                **{
                    f"{name}, 1 head": known[name] | {"model.num_heads": 1}
                    for name in (LOG, "Gated DeltaNet", "Kimi Delta Attention")
                },
                **hybrids(cast(Layers, known[LOG]["model.attention"])),
            },
            "learning_rate": sweeps.learning_rates(2.5e-3, 5e-3, 1e-2, 2e-2, 4e-2, 8e-2),
            "seed": sweeps.seeds(0, 1),
        },
        search="neighbors",
        metric="accuracy",
        extra_metrics=tuple(f"accuracy_{pairs}_pairs" for pairs in PAIRS),
        reached=("accuracy_8_pairs", 0.9),
        baseline="log, 144 slots",
        plots=tuple(
            Points(
                f"accuracy_{pairs}_pairs",
                title=f"{pairs} pairs",
                chance=1 / pairs,
                frontier=True,
                highlighted=COLORS,
            )
            for pairs in (16, 64)
        ),
    )
