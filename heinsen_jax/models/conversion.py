"""Weights of one model for another with other attention layers."""

import dataclasses
import re
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.models.language_model import LanguageModel
from heinsen_jax.pytrees import flatten_with_names

_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")
MAY_DIFFER = {"attention", "num_heads", "key_depth", "value_depth", "qk_norm"}
MAY_DIFFER |= {"dtype", "param_dtype", "remat", "remat_policy"}
"""Fields of attention layers, and of the computation."""


class _Place(NamedTuple):
    """A parameter, or that of one layer in a stack of layers."""

    name: str
    layer: int | None = None


def shared_weights(config: LanguageModelConfig, source: LanguageModel) -> dict[str, np.ndarray]:
    """The parameters of a model that another one has, too, by the names of the former, in the
    memory of this host.

    Layers are matched by their index, so that the layer patterns may differ, and parameters by
    their name and shape within the layer.

    Args:
      config: the architecture.
      source: a model of the same architecture, but for its attention layers.

    Raises:
      UserError: the architectures differ elsewhere; the message names the field.

    Examples:
      >>> config = LanguageModelConfig(vocab_size=8, model_dim=8, num_layers=2, num_heads=2)
      >>> source = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> len(shared_weights(config, source)) == len(flatten_with_names(nnx.state(source)))
      True
    """
    weights = flatten_with_names(jax.tree.map(np.asarray, nnx.state(source, nnx.Param)))
    shared = {}
    for name, (leaf, places) in _matched(config, source.config).items():
        parts = [weights[x.name] if x.layer is None else weights[x.name][x.layer] for x in places]
        if parts:
            value = parts[0] if places[0].layer is None else np.stack(parts)
            shared[name] = value.astype(leaf.dtype)
    return shared


def new_parameters(config: LanguageModelConfig, source: LanguageModelConfig) -> frozenset[str]:
    """Names of the parameters of a model that one of the architecture `source` does not have.

    Raises:
      UserError: as `shared_weights`.
    """
    return frozenset(name for name, (_, places) in _matched(config, source).items() if not places)


def _matched(
    config: LanguageModelConfig, source: LanguageModelConfig
) -> dict[str, tuple[jax.ShapeDtypeStruct, list[_Place]]]:
    """The parameters of a model by name, each with its places in a model of the architecture
    `source`: one for each layer of a stack, and none if the latter does not have it."""
    for field in dataclasses.fields(config):
        ours, theirs = (getattr(x, field.name) for x in (config, source))
        if field.name not in MAY_DIFFER and ours != theirs:
            raise UserError(
                f"model.{field.name}={ours!r} differs from {theirs!r} of the model with the "
                "weights: make them equal; only attention layers may differ"
            )
    period, of_source = len(config.layer_pattern), len(source.layer_pattern)
    known = _parameters(source)
    found: dict[str, tuple[jax.ShapeDtypeStruct, list[_Place]]] = {}
    for name, leaf in _parameters(config).items():
        in_block = _IN_BLOCK.fullmatch(name)
        if in_block is None:
            places, axis = [_Place(name)], 0
        else:
            layers, axis = range(int(in_block[1]), config.num_layers, period), 1
            rest = in_block[2]
            places = [_Place(f"blocks.{x % of_source}.{rest}", x // of_source) for x in layers]
        shapes = [known[x.name].shape[axis:] if x.name in known else None for x in places]
        found[name] = leaf, places if set(shapes) == {leaf.shape[axis:]} else []
    return found


def _parameters(config: LanguageModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the parameters by name."""
    return flatten_with_names(nnx.state(LanguageModel.abstract(config), nnx.Param))
