"""Weights of one model for another with other attention layers."""

import re
from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx

from heinsen_jax.errors import UserError
from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.models.language_model import LanguageModel
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.typing import Array

_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")


def shared_weights(config: LanguageModelConfig, source: LanguageModel) -> dict[str, Array]:
    """The parameters of a model that another one has, too, by the names of the former.

    Layers are matched by their index, so that the layer patterns may differ, and parameters by
    their name and shape within the layer.

    Args:
      config: the architecture.
      source: a model with the same number of layers.

    Raises:
      UserError: the source has another number of layers, or lacks parameters outside of the
        attention layers; the message names the first one.

    Examples:
      >>> config = LanguageModelConfig(vocab_size=8, model_dim=8, num_layers=2, num_heads=2)
      >>> source = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> len(shared_weights(config, source)) == len(flatten_with_names(nnx.state(source)))
      True
    """
    if config.num_layers != source.config.num_layers:
        raise UserError(
            f"model.num_layers={config.num_layers} differs from the {source.config.num_layers} "
            "layers of the model with the weights: make them equal"
        )
    abstract = nnx.eval_shape(lambda: LanguageModel(config, rngs=nnx.Rngs(0)))
    wanted = flatten_with_names(nnx.state(abstract, nnx.Param))
    known = _by_layer(flatten_with_names(nnx.state(source, nnx.Param)), source.config)
    shared: dict[str, Array] = {}
    for name, leaf in wanted.items():
        in_block = _IN_BLOCK.fullmatch(name)
        if in_block is None:
            found, shape = [known.get((None, name))], leaf.shape
        else:
            first, pattern = int(in_block[1]), len(config.layer_pattern)
            layers = range(first, config.num_layers, pattern)
            found, shape = [known.get((layer, in_block[2])) for layer in layers], leaf.shape[1:]
        parts = [x for x in found if x is not None and x.shape == shape]
        if len(parts) == len(found):
            whole = parts[0] if in_block is None else jnp.stack(parts)
            shared[name] = whole.astype(leaf.dtype)
        elif in_block is None or not in_block[2].startswith("attention."):
            theirs = "none" if found[0] is None else f"one of {[*found[0].shape]}"
            raise UserError(
                f"parameter {name} of {[*shape]}: the model with the weights has {theirs}; only "
                "attention layers may differ"
            )
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
