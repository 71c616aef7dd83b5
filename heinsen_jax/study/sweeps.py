"""Common axes of studies: mechanisms, learning rates, seeds, widths."""

from heinsen_jax import attention
from heinsen_jax.study.grid import FieldValue

Sweep = dict[str, dict[str, FieldValue]]


def mechanism(name: str, **options: int | float | str) -> dict[str, FieldValue]:
    """The fields for a mechanism with options."""
    pairs = tuple((f"{name}.{field}", value) for field, value in options.items())
    return {"model.attention": name, "model.attention_options": pairs}


def causal_mechanisms(length: int) -> Sweep:
    """All causal mechanisms, and some variants of log-attention.

    Windows, segments and blocks are fractions of `length`: their defaults would span short
    sequences completely.

    Args:
      length: length of the shortest training sequences, at least 16.
    """
    if length < 16:
        raise ValueError(f"length={length} must be at least 16: windows are fractions of it")
    part = length // 4
    options: dict[str, dict[str, int]] = {
        "gqa": {"num_kv_heads": 1},
        "sliding_window": {"window_size": part},
        "dilated": {"window_size": part // 2, "dilation": 4},
        "longformer": {"window_size": part, "num_global_tokens": 2},
        "tglobal": {"radius": part - 1, "block_size": 4},
        "block_sparse": {"block_size": part // 2, "num_summaries": 2},
        "l1_sparse": {"window_size": part // 4},
        "rmt": {"segment_length": part, "num_memories": 4},
    }
    log: dict[str, dict[str, int | str]] = {
        "log": {},
        "log, linear values": {"values": "linear"},
        "log, decay by head": {"values": "linear", "decay": "head", "max_timescale": length},
        "log, decay by feature": {"values": "linear", "decay": "feature", "max_timescale": length},
    }
    causal = [x for x in attention.names() if attention.mechanism(x).capabilities.causal]
    others = {name: mechanism(name, **options.get(name, {})) for name in causal if name != "log"}
    return {label: mechanism("log", **chosen) for label, chosen in log.items()} | others


def learning_rates(*rates: float) -> Sweep:
    """Peak learning rates; each decays to a tenth of the peak."""
    return {
        f"{rate:g}": {"optimizer.learning_rate": rate, "optimizer.end_learning_rate": rate / 10}
        for rate in rates
    }


def seeds(*numbers: int) -> Sweep:
    """Seeds of the initial weights and of the data."""
    return {str(number): {"seed": number} for number in numbers}


def widths(*sizes: int) -> Sweep:
    """Widths of the residual stream."""
    return {str(size): {"model.model_dim": size} for size in sizes}
