"""Associative recall at Zoology's sizes, for every causal mechanism, on GPUs.

python -m studies recall_zoology --executor ray --gpus 1

Lengths, pairs, widths, learning rates and batch sizes follow Arora et al., 2023, arXiv:2312.04927.
Instead of 64 epochs over 100,000 examples, the same number of examples is drawn without repetition.
Blocks, convolutions, MLPs and windows are the same as in `recall.py`.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from studies import Points, Study, sweeps

ABOUT = """
The tasks of Arora et al., 2023, Zoology, arXiv:2312.04927, at their lengths, widths and learning
rates, with the same number of examples but without repetition, in our block with convolutions and
MLPs.
"""
EXAMPLES = 6_400_000
RATES = 10**-4, 10 ** (-10 / 3), 10 ** (-8 / 3), 10**-2


def task(pairs: int, length: int, batch_size: int) -> dict[str, int]:
    return {
        "data.num_pairs": pairs,
        "data.sequence_length": length,
        "data.batch_size": batch_size,
        "training.steps": EXAMPLES // batch_size,
        "training.evaluate_every": EXAMPLES // batch_size,
    }


def get_study() -> Study:
    base = load_config("recall")
    tasks = {
        "4 pairs, 64 tokens": task(4, 64, 512),
        "8 pairs, 128 tokens": task(8, 128, 512),
        "16 pairs, 256 tokens": task(16, 256, 256),
        "64 pairs, 512 tokens": task(64, 512, 128),
    }
    return Study(
        title="Associative recall at Zoology's sizes",
        about=ABOUT,
        base=replace(
            base,
            data=replace(base.data, vocab_size=8192, validation_examples=3000),
            model=replace(base.model, vocab_size=8192, num_heads=1),
        ),
        axes={
            "task": tasks,
            "mechanism": sweeps.causal_mechanisms(length=64),
            "width": sweeps.widths(64, 128, 256, 512),
            "learning_rate": sweeps.learning_rates(*RATES),
        },
        metric="accuracy",
        plots=tuple(
            Points("accuracy", title=name, where={"task": name}, highlighted=sweeps.COLORS)
            for name in tasks
        ),
    )
