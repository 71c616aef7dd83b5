"""Weights of one model for another with other attention layers."""

import dataclasses
import re
from collections.abc import Mapping

import numpy as np
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.models.language_model import LanguageModel
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.typing import Array

_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")


MAY_DIFFER = {"attention", "num_heads", "key_depth", "value_depth", "qk_norm"}
MAY_DIFFER |= {"dtype", "param_dtype", "remat", "remat_policy"}
"""Fields of attention layers, and of the computation."""


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
    for field in dataclasses.fields(config):
        ours, theirs = (getattr(x, field.name) for x in (config, source.config))
        if field.name not in MAY_DIFFER and ours != theirs:
            raise UserError(
                f"model.{field.name}={ours!r} differs from {theirs!r} of the model with the "
                "weights: make them equal; only attention layers may differ"
            )
    abstract = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    wanted = flatten_with_names(nnx.state(abstract, nnx.Param))
    known = _by_layer(flatten_with_names(nnx.state(source, nnx.Param)), source.config)
    shared: dict[str, np.ndarray] = {}
    for name, leaf in wanted.items():
        in_block = _IN_BLOCK.fullmatch(name)
        if in_block is None:
            found, shape = [known.get((None, name))], leaf.shape
        else:
            first, pattern = int(in_block[1]), len(config.layer_pattern)
            layers = range(first, config.num_layers, pattern)
            found, shape = [known.get((layer, in_block[2])) for layer in layers], leaf.shape[1:]
        parts = [np.asarray(x) for x in found if x is not None and x.shape == shape]
        if len(parts) == len(found):
            shared[name] = (parts[0] if in_block is None else np.stack(parts)).astype(leaf.dtype)
    return shared


def _by_layer(
    parameters: Mapping[str, Array], config: LanguageModelConfig
) -> dict[tuple[int | None, str], Array]:
    """The parameters by the index of their layer, None outside of layers, and their name in it."""
    found: dict[tuple[int | None, str], Array] = {}
    for name, value in parameters.items():
        in_block = _IN_BLOCK.fullmatch(name)
        if in_block is None:
            found[None, name] = value
            continue
        first, pattern = int(in_block[1]), len(config.layer_pattern)
        for layer in range(first, config.num_layers, pattern):
            found[layer, in_block[2]] = value[layer // pattern]
    return found
