"""Scaling of the loss with parameters and with training tokens, and fitted power laws.

python -m studies scaling --jobs 2

Needs about five hours on two CPU cores.
"""

from dataclasses import replace

from heinsen_jax.config import load_config
from studies import PowerLawPlot, Study, sweeps
from studies.grid import FieldValue
from studies.plots import Cost

ABOUT = """
Language models of the bytes of Python's library: the decay block, four layers with heads of 32, a
convolution of 4 tokens before each branch, Muon, and updates of 8 x 256 bytes. Two series share a
model: widths 64 to 256 with 500 updates (1.0 million bytes), and width 128 with 125 to 2000 updates
(0.26 to 4.1 million bytes). Each run has its own decay of the learning rate. Loss in nats per byte
on 0.16 million bytes of the files for validation.

The MLP of Gated DeltaNet is narrower, for about as many parameters.

All widths have the same number of updates, fewer than large models need, and hyperparameters other
than the learning rate are tuned at width 128. The exponents compare mechanisms under these
conditions. They do not extrapolate: sizes span little more than one order of magnitude, and the
fitted laws have no irreducible loss. Parameters include embeddings, 8% at width 64.
"""
WIDTHS = 64, 96, 128, 192, 256
UPDATES = 125, 250, 500, 1000, 2000
COLORS = {
    "log, decay by head": sweeps.COLORS["log, decay by head"],
    "softmax, rotary": sweeps.COLORS["softmax"],
    "Gated DeltaNet": sweeps.COLORS["Gated DeltaNet"],
}


def scale(width: int, updates: int) -> dict[str, dict[str, FieldValue]]:
    fields: dict[str, FieldValue] = {"model.model_dim": width, "model.num_heads": width // 32}
    fields |= {"training.steps": updates, "optimizer.warmup_steps": updates // 10}
    return {f"width {width}, {updates} updates": fields}


def get_study() -> Study:
    base = load_config("quickstart")
    by_width = dict(pair for width in WIDTHS for pair in scale(width, 500).items())
    by_updates = dict(pair for updates in UPDATES for pair in scale(128, updates).items())
    series: tuple[tuple[Cost, str, sweeps.Sweep], ...] = (
        ("parameters", "1.0 million bytes of training", by_width),
        ("tokens", "width 128", by_updates),
    )
    return Study(
        title="Scaling of language models of Python code",
        about=ABOUT,
        base=replace(
            base,
            model=replace(base.model, block="decay"),
            data=replace(base.data, sequence_length=256),
            optimizer=replace(base.optimizer, name="muon"),
            training=replace(
                base.training,
                log_every=100,
                evaluate_every=max(UPDATES),
                evaluation_batches=80,
                sample_tokens=0,
            ),
        ),
        axes={
            "model": {
                "log, decay by head": sweeps.mechanism("log"),
                "softmax, rotary": sweeps.mechanism("softmax"),
                "Gated DeltaNet": sweeps.mechanism("gated_deltanet") | {"model.mlp_ratio": 3},
            },
            "scale": by_width | by_updates,
            "learning_rate": sweeps.learning_rates(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2),
            "seed": sweeps.seeds(1, 2),
        },
        search="neighbors",
        baseline="log, decay by head",
        plots=tuple(
            PowerLawPlot(
                "loss",
                cost,
                lines="model",
                title=title,
                unit="nats per byte",
                highlighted=COLORS,
                where={"scale": (*scales,)},
            )
            for cost, title, scales in series
        ),
    )
