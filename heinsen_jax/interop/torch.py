"""Weights of the published PyTorch model, as arrays by name or as files, without PyTorch."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from heinsen_jax.errors import UserError
from heinsen_jax.interop.pickled import read_pickled
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.runs.weights import check_finite
from heinsen_jax.typing import ArrayLike

__all__ = ["from_file", "from_state_dict", "to_file", "to_state_dict"]

# PyTorch name -> (path in LanguageModel, transposed). A name with {} exists once per layer.
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


def from_state_dict(arrays: Mapping[str, ArrayLike], *, num_heads: int) -> LanguageModel:
    """Create the published PyTorch model (Heinsen, 2024) from its weights.

    Args:
      arrays: NumPy-like arrays by PyTorch name, as in the model's `state_dict()`.
      num_heads: number of heads, which the weights do not determine.

    Returns:
      A `LanguageModel` in float32, or in float64 if the weights are; all sizes follow from their
      shapes.

    Raises:
      ValueError: an entry is missing, unknown, or has the wrong shape; the message names it.
    """
    layers = {int(m[1]) for name in arrays if (m := re.match(r"layers\.(\d+)\.", name))}
    num_layers = max(layers, default=-1) + 1
    expected = {each for name in _NAMES for each in _each_layer(name, num_layers)}
    if problems := expected ^ set(arrays):
        name = min(problems)
        kind = "is missing" if name in expected else "is not part of the published model"
        raise ValueError(f"state dict entry {name!r} {kind}")
    config = _config({name: np.shape(x) for name, x in arrays.items()}, num_layers, num_heads)
    if np.asarray(arrays["embed.weight"]).dtype == np.float64:
        config = LanguageModelConfig(
            **{**vars(config), "dtype": "float64", "param_dtype": "float64"}
        )

    graph, state = nnx.split(LanguageModel.abstract(config))
    parameters = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(state)}
    for name, (path, transposed) in _NAMES.items():
        parts = [np.asarray(arrays[each]) for each in _each_layer(name, num_layers)]
        leaf = parameters[path]
        want = leaf.shape[1:] if "{}" in name else leaf.shape
        for each, part in zip(_each_layer(name, num_layers), parts, strict=True):
            if part.shape != (want[::-1] if transposed else want):
                raise ValueError(
                    f"state dict entry {each!r} has shape {part.shape}, "
                    f"which does not fit {num_heads} heads and the other entries"
                )
        parts = [part.T if transposed else part for part in parts]
        value = np.stack(parts) if "{}" in name else parts[0]
        leaf.set_value(jnp.asarray(value, leaf.dtype))
    return nnx.merge(graph, state)


def to_state_dict(model: LanguageModel) -> dict[str, np.ndarray]:
    """The inverse of `from_state_dict`: a state dict for the published PyTorch model.

    Raises:
      ValueError: the model is not the published one; the message names the field.

    Examples:
      >>> from heinsen_jax.models import LanguageModel, LanguageModelConfig
      >>> sizes = {"vocab_size": 10, "model_dim": 8, "num_layers": 1, "num_heads": 2}
      >>> model = LanguageModel(LanguageModelConfig(**sizes), rngs=nnx.Rngs(0))
      >>> arrays = to_state_dict(model)
      >>> arrays["embed.weight"].shape
      (10, 8)
      >>> again = from_state_dict(arrays, num_heads=2)
    """
    _check_published(model.config)
    state = nnx.to_flat_state(nnx.state(model, nnx.Param))
    parameters = {".".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in state}
    arrays = {}
    for name, (path, transposed) in _NAMES.items():
        value = parameters[path]
        parts = value if "{}" in name else value[None]
        for each, part in zip(_each_layer(name, model.config.num_layers), parts, strict=True):
            arrays[each] = np.ascontiguousarray(part.T if transposed else part)
    return arrays


def from_file(path: str | Path, *, num_heads: int, allow_nonfinite: bool = False) -> LanguageModel:
    """`from_state_dict` for a file: .safetensors, or one of `torch.save(model.state_dict(), path)`
    with any other suffix.

    Raises:
      UserError: the file is damaged, or has other content; or, without `allow_nonfinite`, a value
        is NaN or infinite.
      ValueError: as `from_state_dict`.
    """
    path = Path(path)
    arrays = _read_safetensors(path) if path.suffix == ".safetensors" else read_pickled(path)
    if not isinstance(arrays, Mapping) or not _are_arrays(arrays):
        content = (
            f"entries {sorted(map(str, arrays))[:5]}" if isinstance(arrays, Mapping) else "none"
        )
        raise UserError(
            f"{path} holds no state dict, of tensors by name ({content}); save the model's "
            "state_dict() alone, torch.save(model.state_dict(), path)"
        )
    for name, value in ({} if allow_nonfinite else arrays).items():
        check_finite(value, name, path, "save it again, or set allow_nonfinite=True")
    return from_state_dict(arrays, num_heads=num_heads)


def to_file(model: LanguageModel, path: str | Path) -> None:
    """Write `to_state_dict` as .safetensors, for `safetensors.torch.load_file` in PyTorch.

    Raises:
      ValueError: as `to_state_dict`; or the suffix is not .safetensors.
    """
    if Path(path).suffix != ".safetensors":
        raise ValueError(f"{path} must end in .safetensors: .pt files are read, not written")
    save_file(to_state_dict(model), path)


def _are_arrays(entries: Mapping[str, object]) -> TypeGuard[Mapping[str, np.ndarray]]:
    return all(isinstance(x, np.ndarray) for x in entries.values())


def _read_safetensors(path: Path) -> dict[str, np.ndarray]:
    try:
        return load_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error}); give another file") from None
    except SafetensorError as error:
        raise UserError(f"{path} is damaged ({error}); fetch or save it again") from None


def _each_layer(name: str, num_layers: int) -> list[str]:
    return [name.format(layer) for layer in range(num_layers if "{}" in name else 1)]


_FREE = {"vocab_size", "model_dim", "num_layers", "num_heads", "key_depth", "value_depth"}
_FREE |= {"trained_length", "dtype", "param_dtype", "remat", "remat_policy"}


def _check_published(config: LanguageModelConfig) -> None:
    published = LanguageModelConfig()
    for field in dataclasses.fields(config):
        value, theirs = getattr(config, field.name), getattr(published, field.name)
        is_other = value != theirs
        if field.name == "attention":  # the implementation is not part of it
            options = {option for layer in config.layers for option in layer.options}
            is_other = {*config.layer_pattern} != {theirs} or bool(options - {"implementation"})
        if field.name not in _FREE and is_other:
            raise ValueError(
                f"model.{field.name}={value!r}: the published PyTorch model has {theirs!r}, and "
                "its format has no names for these weights"
            )


def _config(
    shapes: Mapping[str, tuple[int, ...]], num_layers: int, num_heads: int
) -> LanguageModelConfig:
    """Infer the architecture from the shapes: with H heads, W1 has H (2 key_depth + value_depth)
    columns and W2 has H value_depth rows."""
    vocab_size, model_dim = shapes["embed.weight"]
    inner = shapes["layers.0.feedforward1.1.weight"][0]
    values = shapes["layers.0.feedforward2.0.weight"][1]
    if num_heads < 1 or values % num_heads or (inner - values) % (2 * num_heads):
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
