"""Models rewritten as others that compute the same function, for a family of transformers."""

from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.pytrees import flatten_with_names

QWEN3_5 = {"query_key_norm": True, "zero_centered_norm": True, "output_gate": "feature"}
"""Options of softmax attention in Qwen 3.5."""


def with_output_gates(model: LanguageModel) -> LanguageModel | None:
    """A model that computes the same function with the parameters of Qwen 3.5: RMS norms with
    scales of 1 + w, and output gates sigmoid(x 0) = 1/2 before output projections of twice their
    size.

    Args:
      model: a model with layers of Gated DeltaNet, and of softmax attention with normalized queries
        and keys, such as a linearized Qwen 3.

    Returns:
      The model, or None if the given one has other layers or norms.
    """
    config = model.config
    kinds = {*config.layer_pattern}
    if not {"gated_deltanet"} < kinds <= {"gated_deltanet", "gqa", "softmax"}:
        return None
    if config.norm_kind != "rms" or any(x.norm_after for x in config.layers):
        return None
    softmax = [x != "gated_deltanet" for x in config.layer_pattern]
    options = [
        vars(x) for x, is_softmax in zip(config.mechanisms(), softmax, strict=True) if is_softmax
    ]
    if any(x["query_key_norm"] is not True or x["output_gate"] for x in options):
        return None
    layers = [
        replace(layer, options={**layer.options, **QWEN3_5}) if is_softmax else layer
        for layer, is_softmax in zip(config.layers, softmax, strict=True)
    ]
    target = replace(config, attention=tuple(layers), norm="zero_centered_rms", qk_norm=False)
    return _with_values(model, target, softmax)


def _with_values(
    model: LanguageModel, target: LanguageModelConfig, softmax: list[bool]
) -> LanguageModel:
    """The model of the architecture `target`; `softmax` marks layers of softmax attention."""
    values = flatten_with_names(nnx.state(model, nnx.Param))
    gated = tuple(f"blocks.{place}.attention." for place, x in enumerate(softmax) if x)
    graph, state = nnx.split(LanguageModel.abstract(target))
    leaves = []
    for name, leaf in flatten_with_names(state).items():
        in_softmax = name.startswith(gated)
        if name not in values:  # an output gate
            value = np.zeros(leaf.shape, leaf.dtype)
        else:
            value = np.asarray(values[name])
            if name.endswith("norm.scale.value") and (in_softmax or ".attention." not in name):
                value = value - 1
            elif in_softmax and name.endswith(".output.kernel.value"):
                value = 2 * value
        assert value.shape == leaf.shape, name
        leaves.append(value)
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))
