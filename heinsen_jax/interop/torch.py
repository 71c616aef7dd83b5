"""Weights of the published PyTorch model, as arrays by their PyTorch names; needs no PyTorch."""

import re
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.models import LanguageModel, LanguageModelConfig

# PyTorch name -> (path in LanguageModel, transposed). A name with {} exists once a layer.
_NAMES: dict[str, tuple[str, bool]] = {
    "embed.weight": ("embed.embedding", False),
    "embed_pos.dense.weight": ("position.dense.kernel", True),
    "embed_pos.dense.bias": ("position.dense.bias", False),
    "layers.{}.feedforward1.0.weight": ("blocks.0.norm.scale", False),
    "layers.{}.feedforward1.0.bias": ("blocks.0.norm.bias", False),
    "layers.{}.feedforward1.1.weight": ("blocks.0.attention.project.kernel", True),
    "layers.{}.feedforward1.1.bias": ("blocks.0.attention.project.bias", False),
    "layers.{}.feedforward2.0.weight": ("blocks.0.attention.gate.kernel", True),
    "layers.{}.feedforward2.0.bias": ("blocks.0.attention.gate.bias", False),
    "layers.{}.feedforward2.2.weight": ("blocks.0.attention.output.kernel", True),
    "lnorm.weight": ("norm.scale", False),
    "lnorm.bias": ("norm.bias", False),
}


def from_state_dict(arrays: Mapping[str, Any], *, num_heads: int) -> LanguageModel:
    """The published PyTorch model (Heinsen, 2024) with its weights.

    Args:
      arrays: NumPy-like arrays by PyTorch name, as in the model's `state_dict()`.
      num_heads: heads in each layer, which the weights do not tell.

    Returns:
      A `LanguageModel` with the weights' own dtype; all sizes follow from their shapes.

    Raises:
      ValueError: an entry is missing, not known, or of a wrong shape; the message names it.
    """
    layers = {int(m[1]) for name in arrays if (m := re.match(r"layers\.(\d+)\.", name))}
    num_layers = max(layers, default=-1) + 1
    expected = {
        name.format(layer)
        for name in _NAMES
        for layer in (range(num_layers) if "{}" in name else (0,))
    }
    if problems := expected ^ set(arrays):
        name = min(problems)
        kind = "is missing" if name in expected else "is not part of the published model"
        raise ValueError(f"state dict entry {name!r} {kind}")
    config = _config({name: np.shape(x) for name, x in arrays.items()}, num_layers, num_heads)
    if np.asarray(arrays["embed.weight"]).dtype == np.float64:
        config = LanguageModelConfig(
            **{**vars(config), "dtype": "float64", "param_dtype": "float64"}
        )

    model = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(model)
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    for name, (path, transposed) in _NAMES.items():
        numbers = range(num_layers) if "{}" in name else None
        parts = [np.asarray(arrays[name.format(i)]) for i in numbers or (0,)]
        parts = [part.T if transposed else part for part in parts]
        value = np.stack(parts) if numbers is not None else parts[0]
        leaf = parameters[path]
        if value.shape != leaf.shape:
            shape = parts[0].shape[:: -1 if transposed else 1]
            raise ValueError(
                f"state dict entry {name!r} has shape {shape}, "
                f"which does not fit {num_heads} heads and the other entries"
            )
        leaf.set_value(jnp.asarray(value, leaf.dtype))
    return nnx.merge(graph, state)


def _config(
    shapes: Mapping[str, tuple[int, ...]], num_layers: int, num_heads: int
) -> LanguageModelConfig:
    """The architecture that the shapes tell: with H heads, W1 is H (2 key_depth + value_depth) wide
    and W2 H value_depth."""
    vocab_size, model_dim = shapes["embed.weight"]
    inner = shapes["layers.0.feedforward1.1.weight"][0]
    values = shapes["layers.0.feedforward2.0.weight"][1]
    if values % num_heads or (inner - values) % (2 * num_heads):
        raise ValueError(
            f"num_heads={num_heads} does not fit layers of {inner} and {values} features"
        )
    return LanguageModelConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=num_layers,
        num_heads=num_heads,
        key_depth=(inner - values) // (2 * num_heads),
        value_depth=values // num_heads,
    )
