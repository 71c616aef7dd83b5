"""A small study for tests."""

from dataclasses import replace
from pathlib import Path

from heinsen_jax.config import (
    ExperimentConfig,
    LanguageModelConfig,
    OptimizerConfig,
    TrainingConfig,
)
from heinsen_jax.data import Induction
from studies import LengthPlot, Points, Ranking, Study

STUDIES = sorted((Path(__file__).parents[2] / "studies/grids").glob("*.py"))
BASE = ExperimentConfig(
    model=LanguageModelConfig(
        vocab_size=8, model_dim=8, num_layers=1, num_heads=2, attention="linear"
    ),
    data=Induction(
        num_letters=2,
        sequence_length=8,
        batch_size=16,
        validation_examples=64,
        test_lengths=(4, 16),
    ),
    optimizer=OptimizerConfig(warmup_steps=1),
    training=TrainingConfig(steps=4, evaluate_every=2, sample_tokens=0),
)
STUDY = Study(
    title="A small study",
    about="Whether it works.",
    base=BASE,
    axes={
        "mechanism": {"linear": {}, "softmax": {"model.attention": "softmax"}},
        "width": {"8": {"model.model_dim": 8}, "16": {"model.model_dim": 16}},
        "learning_rate": {f"{x:g}": {"optimizer.learning_rate": x} for x in (1e-3, 1e-2, 1e-1)},
        "seed": {"0": {"seed": 0}, "1": {"seed": 1}, "2": {"seed": 2}},
    },
    metric="accuracy",
    extra_metrics=("accuracy_16",),
    plots=(Points("accuracy"), LengthPlot((4, 16)), Ranking("accuracy")),
)
PLAIN = replace(STUDY, plots=())  # plotting is slower than the rest
SMALLER = replace(
    STUDY,
    axes={"mechanism": STUDY.axes["mechanism"], "seed": {"0": {"seed": 0}}},
)
GOOD = {"8": "0.01", "16": "0.1"}  # the best learning rate of each width


class Fake:
    """Simulated runs: accuracy depends on width and learning rate."""

    def __init__(
        self, fail_after: int = 10**9, failed: str | None = None, content: dict | None = None
    ):
        self.done, self.fail_after, self.failed = [], fail_after, failed
        self.content = content or {}

    def __call__(self, runs, folder):
        for run in runs:
            if len(self.done) == self.fail_after:
                raise KeyboardInterrupt
            labels = run.labels
            accuracy = 0.5 + 0.25 * (labels["learning_rate"] == GOOD[labels["width"]])
            accuracy += 0.01 * int(labels["seed"])
            metrics = {"loss": 1.0, "accuracy": accuracy}
            metrics |= {f"accuracy_{n}": accuracy / n for n in (4, 16)}
            row = {"metrics": metrics} if labels["mechanism"] != self.failed else {"failed": "NaN!"}
            place = {"cpu": "a CPU", "backend": "cpu", "device": "cpu", "jax": "1"}
            place |= {"commit": "abc", "uncommitted_changes": False}
            costs = {"parameters": 100, "state_bytes": 10 * int(labels["width"]), "seconds": 1.0}
            self.done.append(labels)
            yield run, {**row, **costs, "environment": place, "content": self.content}
