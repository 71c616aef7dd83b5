"""Features and decay of log-attention: how much recall fits into a state?

python -m studies recall_features --jobs 2

Needs about an hour and a quarter on two CPU cores.
"""

import math
from dataclasses import replace
from typing import Any

from heinsen_jax.config import load_config
from heinsen_jax.models import Layers
from studies import Points, Ranking, Study, sweeps
from studies.grid import FieldValue

ABOUT = """
The task of the study of recall, 8 pairs in 64 tokens, with two layers of width 64. The first group
changes one part of log-attention at a time; the second combines them; the third is the delta rule,
with states of several sizes. "64 x 16" is a head with 64 features, of values with 16 numbers;
unless stated, log-attention has two heads of 32 x 32. Slots are normalized product features with
coupled decay.
"""
BASELINE = "log"
SLOTS = "2 heads, 64 slots x 16"


def log(
    num_heads: int, num_features: int, value_depth: int, **options: Any
) -> dict[str, FieldValue]:
    """Log-attention of values of any sign with heads of this size."""
    key_depths = {"product": 2 * math.isqrt(num_features), "hedgehog": num_features // 2}
    key_depth = key_depths.get(options.get("features", ""), num_features)
    sizes = {"key_depth": key_depth, "value_depth": value_depth}
    chosen = {"values": "linear"} | options | sizes
    return {"model.attention": Layers("log", options=chosen), "model.num_heads": num_heads}


def get_study() -> Study:
    base = load_config("recall")
    norm = {"query_key_norm": True}
    product = {"features": "product"} | norm
    coupled = {"decay": "coupled"}

    def delta(name: str, **sizes: int) -> dict[str, FieldValue]:
        return {"model.attention": Layers(name, options=sizes)}

    changes = {
        BASELINE: {"model.attention": "log"},
        "values of any sign": log(2, 32, 32),
        "normalized queries and keys": log(2, 32, 32, **norm),
        "Hedgehog's features: 2 heads, 64 x 16": log(2, 64, 16, features="hedgehog"),
        "more features: 2 heads, 64 x 16": log(2, 64, 16),
        "one head: 64 x 32": log(1, 64, 32),
        "coupled decay": log(2, 32, 32, **coupled),
        "coupled decay, normalized": log(2, 32, 32, **norm, **coupled),
        "product features: 64 x 32": log(1, 64, 32, **product),
        "product features: 144 x 16": log(1, 144, 16, **product),
        "product features: 2 heads, 64 x 16": log(2, 64, 16, **product),
        "log-values, product features: 144 x 16": log(1, 144, 16, values="log", **product),
        "64 slots x 16": log(1, 64, 16, **product, **coupled),
        "36 slots x 16": log(1, 36, 16, **product, **coupled),
        "144 slots x 16": log(1, 144, 16, **product, **coupled),
        SLOTS: log(2, 64, 16, **product, **coupled),
        "log-values, 64 slots x 16": log(1, 64, 16, values="log", **product, **coupled),
        "Gated DeltaNet, 24 x 48": delta("gated_deltanet"),
        "Gated DeltaNet, 24 x 40": delta("gated_deltanet", key_depth=24, value_depth=40),
        "Gated DeltaNet, 24 x 32": delta("gated_deltanet", key_depth=24, value_depth=32),
        "Gated DeltaNet, 24 x 24": delta("gated_deltanet", key_depth=24, value_depth=24),
        "Gated DeltaNet, 16 x 16": delta("gated_deltanet", key_depth=16, value_depth=16),
        "Gated DeltaNet, 8 x 16": delta("gated_deltanet", key_depth=8, value_depth=16),
        "DeltaNet, 32 x 32": delta("deltanet"),
        "DeltaNet, 16 x 16": delta("deltanet", key_depth=16, value_depth=16),
        "DeltaNet, 8 x 16": delta("deltanet", key_depth=8, value_depth=16),
    }
    colors = {
        BASELINE: sweeps.COLORS["log"],
        SLOTS: sweeps.COLORS["log, slots"],
        "Gated DeltaNet, 24 x 48": sweeps.COLORS["Gated DeltaNet"],
    }
    return Study(
        title="Features and decay of log-attention: recall of 8 pairs",
        about=ABOUT,
        base=replace(base, training=replace(base.training, evaluate_every=800)),
        axes={
            "mechanism": changes,
            "learning_rate": sweeps.learning_rates(1e-3, 3e-3, 1e-2, 3e-2),
            "seed": sweeps.seeds(0, 1),
        },
        search="neighbors",
        metric="accuracy",
        baseline=BASELINE,
        plots=(
            Ranking("accuracy", highlighted=colors, baseline=BASELINE),
            Points("accuracy", chance=1 / 8, frontier=True, highlighted=colors),
        ),
    )
