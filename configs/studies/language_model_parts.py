"""What helps log-attention in a small language model, and what does not, part by part.

python -m heinsen_jax.study configs/studies/language_model_parts.py --jobs 2

For two CPU cores and 40 minutes.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from heinsen_jax.config import load_config
from heinsen_jax.study import Ranking, Study

ABOUT = """
The log-attention of the study of language models, at one learning rate and with one seed, by which
runs differ by about 0.005: smaller differences mean nothing. Where a part takes parameters, the
MLP is narrower, so that there are at most 0.85M.
"""
WINDOW = "sliding_window.window_size", 16


def log(*options: tuple[str, Any], **fields: Any) -> dict[str, Any]:
    """Options of log-attention besides the block's, and other fields of the model."""
    pairs = tuple((f"log.{name}", value) for name, value in options)
    return {"model.attention_options": pairs} | {f"model.{x}": fields[x] for x in fields}


def get_study() -> Study:
    base = load_config(Path(__file__).parents[1] / "shakespeare_char_decay.py")
    turns = {"model.attention": ("log", "sliding_window"), "model.attention_options": (WINDOW,)}
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
                "none": {},
                "no convolution": log(convolution_size=1),
                "no decay": log(
                    ("values", "linear"), block="standard", convolution_size=4, positions="none"
                ),
                "decay by feature, 2 key/value heads": log(
                    ("decay", "feature"), ("num_kv_heads", 2)
                ),
                "memories of 64 tokens at first": log(("max_timescale", 64)),
                "log-values": log(("values", "log")),
                "normalised queries and keys": log(("query_key_norm", True)),
                "gated": log(("gated", True), mlp_ratio=3),
                "8 heads": log(num_heads=8),
                "2 heads": log(num_heads=2),
                "keys of 64 features": log(key_depth=64, mlp_ratio=3),
                "the paper's recurrence, mlp of 3 widths": log(positions="recurrence", mlp_ratio=3),
                "6 layers of width 104": log(num_layers=6, model_dim=104),
                "a window of 16, in turns": turns,
                "a window of 16 alone": turns | {"model.attention": "sliding_window"},
            },
        },
        extra_metrics=("loss_256", "loss_1024"),
        plots=(Ranking("loss"),),
    )
