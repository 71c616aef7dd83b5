"""Weights of one model for another with other attention layers."""

import dataclasses
import re
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from heinsen_jax.attention.base import Attention
from heinsen_jax.attention.heads import HeadedAttention
from heinsen_jax.attention.matrix_state import MatrixStateAttention
from heinsen_jax.errors import UserError
from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.models.language_model import LanguageModel
from heinsen_jax.pytrees import flatten_with_names

_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")
_PART = re.compile(r"attention\.(query|key|value)(\.kernel\.value)")
MAY_DIFFER = {"attention", "num_heads", "key_depth", "value_depth", "qk_norm"}
MAY_DIFFER |= {"dtype", "param_dtype", "remat", "remat_policy"}
"""Fields of attention layers, and of the computation."""


class _Place(NamedTuple):
    """A parameter, or that of one layer in a stack of layers, or some of its columns."""

    name: str
    layer: int | None = None
    columns: np.ndarray | None = None

    def shape(self, known: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[int, ...] | None:
        """Its shape, given the known parameters; None if it is not among them."""
        if self.name not in known:
            return None
        shape = known[self.name].shape[self.layer is not None :]
        return shape if self.columns is None else (*shape[:-1], len(self.columns))

    def value(self, weights: Mapping[str, np.ndarray]) -> np.ndarray:
        value = weights[self.name] if self.layer is None else weights[self.name][self.layer]
        return value if self.columns is None else value[..., self.columns]


def shared_weights(config: LanguageModelConfig, source: LanguageModel) -> dict[str, np.ndarray]:
    """The parameters of a model that another one has, too, by the names of the former, in the
    memory of this host.

    Layers are matched by their index, so that the layer patterns may differ, and parameters by
    their name and shape within the layer. Queries, keys and values that the source projects in one
    product and the model in three are columns of the source's matrix.

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
        parts = [place.value(weights) for place in places]
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
    known = _parameters(source)
    layers, of_source = config.abstract_layers(), source.abstract_layers()
    found: dict[str, tuple[jax.ShapeDtypeStruct, list[_Place]]] = {}
    for name, leaf in _parameters(config).items():
        if (in_block := _IN_BLOCK.fullmatch(name)) is None:
            places, shape = [_Place(name)], leaf.shape
        else:
            places, shape = [], leaf.shape[1:]
            first, period = int(in_block[1]), len(of_source)
            for layer in range(first, config.num_layers, len(layers)):
                pair = layers[first], of_source[layer % period]
                rest, columns = _in_layer(in_block[2], *pair)
                places.append(_Place(f"blocks.{layer % period}.{rest}", layer // period, columns))
        is_known = all(place.shape(known) == shape for place in places)
        found[name] = leaf, places if is_known else []
    return found


def _in_layer(name: str, ours: Attention, theirs: Attention) -> tuple[str, np.ndarray | None]:
    """The name, within a layer of the source, of a parameter of a layer of the model; and its
    columns, if it is a part of a matrix."""
    part = _PART.fullmatch(name)
    if part and isinstance(ours, MatrixStateAttention) and isinstance(theirs, HeadedAttention):
        return f"attention.project{part[2]}", theirs.columns()[part[1]]
    return name, None


def _parameters(config: LanguageModelConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the parameters by name."""
    return flatten_with_names(nnx.state(LanguageModel.abstract(config), nnx.Param))
