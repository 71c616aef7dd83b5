"""Language models of Python code with fewer updates: loss against FLOPs.

python -m studies long_context_updates --jobs 2 --reuse DIR

Needs about three hours on two CPU cores, if DIR has the results of the study long_context.
"""

from dataclasses import replace

from studies import Points, Study, load_study, sweeps

ABOUT = """
Models of the study long_context with 150, 300 and 600 updates, each with its own decay of the
learning rate, and its own best peak. `benchmarks/equal_budgets.py` compares them at equal FLOPs and
at equal time.
"""
MODELS = (
    *("log, decay by head", "softmax, rotary", "FoX", "Gated DeltaNet", "Mamba-2", "GLA"),
    *("3 log, then softmax", "alternating log and softmax", "alternating log and window of 64"),
    *("softmax, ALiBi", "window of 64, rotary"),
)
UPDATES = 150, 300, 600


def get_study() -> Study:
    same = load_study("long_context").restricted("model", MODELS)
    return replace(
        same,
        title="Python code: loss and number of updates",
        about=ABOUT,
        axes={
            "model": same.axes["model"],
            "updates": {
                str(updates): {"training.steps": updates, "optimizer.warmup_steps": updates // 10}
                for updates in UPDATES
            },
            "learning_rate": sweeps.learning_rates(4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2),
            "seed": sweeps.seeds(1, 2),
        },
        plots=tuple(
            Points(
                metric,
                x="flops",
                lines="model",
                unit="nats per token",
                highlighted=same.plots[0].highlighted,
            )
            for metric in ("loss", "loss_2048")
        ),
        extra_metrics=("loss_2048",),
    )
