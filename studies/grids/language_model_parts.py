"""Ablation of log-attention in a small language model.

python -m studies language_model_parts --jobs 2

Needs 40 minutes on two CPU cores.
"""

from dataclasses import replace
from typing import Any

from heinsen_jax.config import load_config
from heinsen_jax.models import Layers
from studies import Ranking, Study, sweeps

ABOUT = """
The log-attention model of the study of language models, at one learning rate and with one seed.
The standard deviation of seeds is about 0.005. Where a change adds parameters, the MLP is narrower,
for at most 0.85M parameters.
"""
BASELINE = "baseline: log, decay by head"
WINDOW = Layers("sliding_window", options={"window_size": 16})


def log(options: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return options of log-attention, and other fields of the model."""
    attention = {"model.attention": Layers("log", options=options)} if options else {}
    return attention | {f"model.{x}": fields[x] for x in fields}


def get_study() -> Study:
    base = load_config("shakespeare_char_decay")
    return Study(
        title="Log-attention, one part changed at a time",
        about=ABOUT,
        base=replace(
            base,
            seed=1,
            training=replace(base.training, log_every=500, evaluate_every=2000, sample_tokens=0),
        ),
        axes={
            "change": {
                BASELINE: {},
                "no convolution": log(convolution_size=1),
                "no decay": log(
                    {"values": "linear"}, block="standard", convolution_size=4, positions="none"
                ),
                "decay by feature, 2 key/value heads": log({"decay": "feature", "num_kv_heads": 2}),
                "initial time constants up to 64 tokens": log({"max_timescale": 64}),
                "log-values": log({"values": "log"}),
                "normalized queries and keys": log({"query_key_norm": True}),
                "gated": log({"gated": True}, mlp_ratio=3),
                "8 heads": log(num_heads=8),
                "2 heads": log(num_heads=2),
                "keys of 64 features": log(key_depth=64, mlp_ratio=3),
                "the paper's recurrence, MLP ratio 3": log(positions="recurrence", mlp_ratio=3),
                "6 layers of width 104": log(num_layers=6, model_dim=104),
                "alternating with windows of 16": {"model.attention": ("log", WINDOW)},
                "windows of 16 only": {"model.attention": WINDOW},
            },
        },
        extra_metrics=("loss_256", "loss_1024"),
        plots=(
            Ranking(
                "loss",
                title="Validation loss after one change; dashed: the baseline",
                unit="nats per character",
                highlighted={BASELINE: sweeps.COLORS["log, decay by head"]},
                baseline=BASELINE,
            ),
        ),
    )
