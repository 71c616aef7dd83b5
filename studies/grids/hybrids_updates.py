"""Hybrids of log-attention and softmax attention on recall, with more learning rates and updates.

python -m studies hybrids_updates --jobs 2 --reuse DIR

Needs about an hour on two CPU cores, if DIR has the results of the study hybrids.
"""

from studies import Ranking, Study, load_study, sweeps

ABOUT = """
Recall of 8 pairs by models of the study hybrids, with 800 updates as there, and with 2400, and four
learning rates: is a task that a model does not learn beyond its capacity, or is it not trained
enough?
"""
CHOSEN = (
    *("log", "softmax", "1 of 8 softmax, first", "1 of 4 softmax, first"),
    *("1 of 4 softmax, last", "1 of 2 softmax, last"),
)
UPDATES = 800, 2400


def get_study() -> Study:
    hybrids = load_study("hybrids").restricted("layers", CHOSEN)
    recall, layers = hybrids.axes["task"]["recall"], hybrids.axes["layers"]
    return Study(
        title="Hybrids, learning rates and updates",
        about=ABOUT,
        base=hybrids.base,
        axes={
            "layers": {name: {**fields, **recall} for name, fields in layers.items()},
            "updates": {str(updates): {"training.steps": updates} for updates in UPDATES},
            "learning_rate": sweeps.learning_rates(5e-3, 1e-2, 2e-2, 4e-2),
            "seed": sweeps.seeds(0, 1),
        },
        search="neighbors",
        metric="accuracy",
        plots=tuple(
            Ranking(
                "accuracy",
                title=f"Recall of 8 pairs, {updates} updates",
                where={"updates": str(updates)},
                chance=1 / 8,
                highlighted=hybrids.plots[0].highlighted,
            )
            for updates in UPDATES
        ),
    )
