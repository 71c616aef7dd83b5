"""Associative recall at the sizes of Zoology, for every causal mechanism. For GPUs.

python -m heinsen_jax.study configs/studies/recall_zoology.py --executor ray --gpus 1

Lengths, pairs, widths, learning rates and sizes of batches are those that were published with Arora
et al., 2023, arXiv:2312.04927. Where these pass 64 times over 100,000 examples, here as many are
new. The block, with its convolutions and MLPs, is ours, that of `recall.py` beside this; so
are the windows, at all lengths.
"""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import load_config
from heinsen_jax.study import Points, Study, sweeps

ABOUT = """
The tasks of Arora et al., 2023, Zoology, arXiv:2312.04927, at their lengths, widths and learning
rates; as many examples, but new ones; in our block, with convolutions and MLPs.
"""
EXAMPLES = 6_400_000
RATES = 10**-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 10**-2


def text(pairs: int, length: int, batch_size: int) -> dict[str, int]:
    return {
        "data.num_pairs": pairs,
        "data.sequence_length": length,
        "data.batch_size": batch_size,
        "training.steps": EXAMPLES // batch_size,
        "training.evaluate_every": EXAMPLES // batch_size,
    }


def get_study() -> Study:
    base = load_config(Path(__file__).parents[1] / "recall.py")
    return Study(
        title="Associative recall at Zoology's sizes",
        about=ABOUT,
        base=replace(
            base,
            data=replace(base.data, vocab_size=8192, validation_examples=3000),
            model=replace(base.model, vocab_size=8192, num_heads=1),
        ),
        axes={
            "text": {
                "4 pairs, 64 tokens": text(4, 64, 512),
                "8 pairs, 128 tokens": text(8, 128, 512),
                "16 pairs, 256 tokens": text(16, 256, 256),
                "64 pairs, 512 tokens": text(64, 512, 128),
            },
            "mechanism": sweeps.causal_mechanisms(length=64),
            "width": sweeps.widths(64, 128, 256, 512),
            "learning_rate": sweeps.learning_rates(*RATES),
        },
        metric="accuracy",
        mode="max",
        plots=(Points("accuracy"),),
    )
