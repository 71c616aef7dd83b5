"""Common axes of studies: mechanisms, learning rates, seeds, widths."""

from heinsen_jax import attention
from heinsen_jax.models import Layers
from studies.grid import FieldValue

Sweep = dict[str, dict[str, FieldValue]]
COLORS = {
    "softmax": "C0",
    "linear": "C1",
    "Performer": "C2",
    "log": "C3",
    "log, decay by head": "C4",
    "recurrent memory": "C5",
    "log, slots": "C6",
    "FoX": "C9",
    "Gated DeltaNet": "C8",
}
"""Colors of highlighted mechanisms by labels of `causal_mechanisms`."""

NAMES = {
    "block_sparse": "block-sparse",
    "deltanet": "DeltaNet",
    "dilated": "dilated window",
    "fox": "FoX",
    "gated_deltanet": "Gated DeltaNet",
    "gla": "GLA",
    "gqa": "softmax, one key/value head",
    "hgrn2": "HGRN2",
    "kda": "Kimi Delta Attention",
    "l1": "L1",
    "l1_sparse": "L1, sparse",
    "log_window": "window merged with log",
    "longformer": "Longformer",
    "mamba2": "Mamba-2",
    "memory_compressed": "memory-compressed",
    "mla": "MLA",
    "mlstm": "mLSTM",
    "performer": "Performer",
    "retnet": "RetNet",
    "rmt": "recurrent memory",
    "sliding_window": "sliding window",
    "taylor": "Taylor",
    "tglobal": "TGlobal",
}
"""Labels of `causal_mechanisms` for registered mechanisms whose names differ from them."""

NOT_RUN = {"short_convolution", "gated_deltaproduct", "gated_deltanet2", "rwkv7", "goom_ssm"}
"""Mechanisms that the committed results of `causal_mechanisms` do not have."""

MECHANISMS = (
    *("log", "log, decay by head", "log, slots", "softmax", "FoX", "MLA"),
    *("linear", "GLA", "Mamba-2", "mLSTM"),
    *("DeltaNet", "Gated DeltaNet", "Kimi Delta Attention"),
)
"""Labels of `causal_mechanisms` that all studies of synthetic tasks have."""

SLOTS: dict[str, int | str] = {
    "values": "linear",
    "features": "product",
    "decay": "coupled",
    "query_key_norm": True,
    "key_depth": 16,
    "value_depth": 16,
}
"""Options of log-attention with 64 slots of 16 values per head."""

THREE_LOGS = Layers("log", repeats=3)
SOFTMAX = Layers("softmax", options={"positions": "none"})
"""Softmax attention without positions, as in hybrids."""
WINDOW = Layers("sliding_window", options={"window_size": 64, "positions": "rotary"})


def mechanism(name: str, **options: int | float | str) -> dict[str, FieldValue]:
    """The field for a mechanism with options."""
    return {"model.attention": Layers(name, options=options) if options else name}


def causal_mechanisms(length: int) -> Sweep:
    """All causal mechanisms but `NOT_RUN`, and some variants of log-attention, by the labels of
    `NAMES`.

    Windows, segments and blocks are fractions of `length`: their defaults would cover short
    sequences completely.

    Args:
      length: length of the shortest training sequences, at least 16.
    """
    if length < 16:
        raise ValueError(f"length={length} must be at least 16: windows are fractions of it")
    log: dict[str, dict[str, int | str]] = {
        "log": {},
        "log, linear values": {"values": "linear"},
        "log, decay by head": {"values": "linear", "decay": "head", "max_timescale": length},
        "log, decay by feature": {"values": "linear", "decay": "feature", "max_timescale": length},
        "log, slots": SLOTS,
    }
    names = (name for name in attention.names() if name != "log" and name not in NOT_RUN)
    classes = {name: attention.mechanism(name) for name in names}
    others = {
        NAMES.get(name, name): mechanism(name, **kind.short_options(length))
        for name, kind in classes.items()
        if kind.capabilities.causal
    }
    others[NAMES["gqa"]] = mechanism("gqa", num_kv_heads=1)
    return {label: mechanism("log", **chosen) for label, chosen in log.items()} | others


def language_models() -> Sweep:
    """Mechanisms and hybrids in the decay block, four layers of width 128, with about as many
    parameters as softmax attention: where a mechanism has more or fewer, so has the MLP."""
    return {
        "log, decay by head": mechanism("log"),
        "log, slots": mechanism("log", **SLOTS | {"value_depth": 32}) | {"model.mlp_dim": 576},
        "softmax, rotary": mechanism("softmax"),
        "FoX": mechanism("fox"),
        "Gated DeltaNet": mechanism("gated_deltanet") | {"model.mlp_dim": 384},
        "Mamba-2": mechanism("mamba2", key_depth=32) | {"model.mlp_dim": 352},
        "3 log, then softmax": {"model.attention": (THREE_LOGS, SOFTMAX)},
        "alternating log and softmax": {"model.attention": ("log", SOFTMAX)},
    }


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
