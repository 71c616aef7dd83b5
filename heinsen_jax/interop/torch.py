"""Weights of the published PyTorch model, as arrays by name or as files, without PyTorch."""

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors.numpy import load_file, save_file

from heinsen_jax.errors import UserError
from heinsen_jax.interop.pickled import read_pickled
from heinsen_jax.interop.tensors import DENSE, SAME, Names, entries, shapes_of, tensors_of
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.weights import check_finite, reading_arrays
from heinsen_jax.typing import ArrayLike

__all__ = ["from_file", "from_state_dict", "to_file", "to_state_dict"]

# Module of this package -> (PyTorch module, layout). A name with {} exists once per layer.
_NAMES: Names = {
    "embed": ("embed", SAME),
    "position.dense": ("embed_pos.dense", DENSE),
    "blocks.norm": ("layers.{}.feedforward1.0", SAME),
    "blocks.attention.project": ("layers.{}.feedforward1.1", DENSE),
    "blocks.attention.gate": ("layers.{}.feedforward2.0", DENSE),
    "blocks.attention.output": ("layers.{}.feedforward2.2", DENSE),
    "norm": ("lnorm", SAME),
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
    config = _config({name: np.shape(x) for name, x in arrays.items()}, num_heads)
    if np.asarray(arrays["embed.weight"]).dtype == np.float64:
        config = dataclasses.replace(config, dtype="float64", param_dtype="float64")
    graph, state = nnx.split(LanguageModel.abstract(config))
    leaves = flatten_with_names(state)
    parameters = entries(_NAMES, config, leaves)
    shapes = shapes_of(parameters, leaves)
    if problems := shapes.keys() ^ arrays.keys():
        name = min(problems)
        kind = "is missing" if name in shapes else "is not part of the published model"
        raise ValueError(f"state dict entry {name!r} {kind}")
    for name, shape in shapes.items():
        if np.shape(arrays[name]) != shape:
            raise ValueError(
                f"state dict entry {name!r} has shape {np.shape(arrays[name])}, "
                f"which does not fit {num_heads} heads and the other entries"
            )
    values = [
        jnp.asarray(x.load(leaves[x.path], lambda name: np.asarray(arrays[name])))
        for x in parameters
    ]
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), values))


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
    leaves = flatten_with_names(nnx.state(model, nnx.Param))
    tensors = tensors_of(entries(_NAMES, model.config, leaves), leaves)
    return {name: np.ascontiguousarray(x) for name, x in tensors.items()}


def from_file(path: str | Path, *, num_heads: int, allow_nonfinite: bool = False) -> LanguageModel:
    """`from_state_dict` for a file: .safetensors, or one of `torch.save(model.state_dict(), path)`
    with any other suffix.

    Raises:
      UserError: the file is damaged, or has other content; or, without `allow_nonfinite`, a value
        is NaN or infinite.
      ValueError: as `from_state_dict`.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        with reading_arrays(path, "fetch or save it again"):
            arrays = load_file(path)
    else:
        arrays = read_pickled(path)
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
            is_other |= any(layer.norm_after for layer in config.layers)
        if field.name not in _FREE and is_other:
            raise ValueError(
                f"model.{field.name}={value!r}: the published PyTorch model has {theirs!r}, and "
                "its format has no names for these weights"
            )


def _config(shapes: Mapping[str, tuple[int, ...]], num_heads: int) -> LanguageModelConfig:
    """Infer the architecture from the shapes: with H heads, W1 has H (2 key_depth + value_depth)
    columns and W2 has H value_depth rows."""
    sizes = "embed.weight", "layers.0.feedforward1.1.weight", "layers.0.feedforward2.0.weight"
    for name in sizes:
        if len(shapes.get(name, ())) != 2:
            raise ValueError(f"state dict entry {name!r} is missing, or not a matrix")
    (vocab_size, model_dim), (inner, _), (_, values) = (shapes[name] for name in sizes)
    if num_heads < 1 or values % num_heads or (inner - values) % (2 * num_heads):
        raise ValueError(
            f"num_heads={num_heads} does not fit layers of {inner} and {values} features"
        )
    layers = (re.match(r"layers\.(\d+)\.", name) for name in shapes)
    return LanguageModelConfig(
        vocab_size=vocab_size,
        model_dim=model_dim,
        num_layers=len({match[1] for match in layers if match}),
        num_heads=num_heads,
        key_depth=(inner - values) // (2 * num_heads),
        value_depth=values // num_heads,
    )
