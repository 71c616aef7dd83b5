"""State tracking: the parity of all bits so far. Tested at 8 times the training length.

python train.py --config configs/state_tracking.py [--model.attention softmax]

Needs a minute on one CPU core, with the model of configs/recall.py: 300 updates of 64 sequences of
32 bits. Expected: accuracy above 0.99 at the training length and above 0.95 at 256 bits. DeltaNet
without negative eigenvalues stays below 0.75 at the training length; a guess is right half of the
time. For permutations of five items, use --data.group s5 --model.vocab-size 121.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import ExperimentConfig, Layers, load_config
from heinsen_jax.data import StateTracking


def get_config() -> ExperimentConfig:
    base = load_config(Path(__file__).with_name("recall.py"))
    data = StateTracking(sequence_length=32, test_lengths=(64, 128, 256))
    layers = Layers("deltanet", options={"negative_eigenvalues": True})
    return replace(
        base,
        data=data,
        model=replace(base.model, vocab_size=data.vocab_size, attention=layers),
        training=replace(base.training, steps=300, evaluate_every=300),
    )
