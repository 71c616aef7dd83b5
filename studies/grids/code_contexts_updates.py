"""Language models of Python code with four times as many updates: does their order change?

python -m studies code_contexts_updates --jobs 2 --reuse DIR

Needs about six hours on two CPU cores, if DIR has the results of the study code_contexts.
"""

from collections.abc import Mapping
from dataclasses import replace

from studies import Points, PositionPlot, Study, load_study, sweeps
from studies.grid import FieldValue
from studies.grids.code_contexts import BEST, LENGTHS, RATE

ABOUT = """
Models of the study code_contexts with 600 and with 2400 updates, which are 0.7 and 2.8 epochs. Each
number has its own decay of the learning rate. Peaks were searched for 600 updates; for 2400, the
best one of 600 and half of it were tried, and others may be better. Models of 2400 updates are also
tested on sequences of 8192 tokens. A twentieth of the files chooses the learning rates; losses are
of another twentieth.
"""
UPDATES = 600, 2400
LONGEST = 8192


def length_of_training(updates: int) -> dict[str, FieldValue]:
    """Fields of a number of updates, where 600 are as in the study code_contexts."""
    fields: dict[str, FieldValue] = {
        "training.steps": updates,
        "training.evaluate_every": updates,
        "optimizer.warmup_steps": updates // 10,
    }
    return fields | {"data.test_lengths": LENGTHS} if updates == UPDATES[0] else fields


def is_run(labels: Mapping[str, str]) -> bool:
    """Whether a learning rate is tried with a number of updates."""
    return labels["updates"] != str(UPDATES[-1]) or labels["learning_rate"] in ("0.008", RATE)


def get_study() -> Study:
    same = load_study("code_contexts").restricted("model", BEST)
    data = replace(same.base.data, test_lengths=(*LENGTHS, LONGEST))
    colors, unit = same.plots[0].highlighted, "nats per token"
    return replace(
        same,
        title="Python code: loss and number of updates",
        about=ABOUT,
        base=replace(same.base, data=data),
        axes={
            "model": same.axes["model"],
            "updates": {str(updates): length_of_training(updates) for updates in UPDATES},
            "learning_rate": same.axes["learning_rate"],
            "seed": sweeps.seeds(1, 2),
        },
        select=is_run,
        extra_metrics=("test_loss_2048", f"test_loss_{LONGEST}"),
        plots=(
            *(
                Points(metric, x="flops", lines="model", unit=unit, highlighted=colors)
                for metric in ("test_loss", "test_loss_2048")
            ),
            PositionPlot(
                LONGEST,
                metric="test_loss",
                lines="model",
                where={"updates": str(UPDATES[-1])},
                unit=unit,
                highlighted=colors,
            ),
        ),
    )
