"""Convert a model to other attention layers: its architecture and its weights."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import cache
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from heinsen_jax.attention.base import Attention
from heinsen_jax.attention.goom_ssm import GoomSSM
from heinsen_jax.attention.heads import HeadedAttention
from heinsen_jax.attention.matrix_state import MatrixStateAttention
from heinsen_jax.attention.parameters import LORA
from heinsen_jax.attention.registry import FieldValue, ParallelAttention
from heinsen_jax.attention.rotary import RotaryOptions
from heinsen_jax.attention.short_convolution import ShortConvolution
from heinsen_jax.errors import UserError, explain
from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.models.language_model import LanguageModel
from heinsen_jax.models.pattern import Layers, parse_pattern, shortest_period, single_layers
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.typing import wide

_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")
_PART = re.compile(r"attention\.(query|key|value)(\.kernel\.value)")
RECURRENT = MatrixStateAttention, ShortConvolution, GoomSSM
"""Layers of a teacher that stay as they are."""
MAY_DIFFER = {"attention", "key_depth", "value_depth", "qk_norm"}
MAY_DIFFER |= {"trained_length", "dtype", "param_dtype", "remat", "remat_policy", "lora_rank"}
"""Fields of attention layers, and of the computation."""
FACTORS = {"scale": None, "output_multiplier": 1.0}
"""Options that new layers must have, if they are not the defaults in the layers that they
replace."""
COPIED = {field.name for field in fields(RotaryOptions)} | {"positions", "output_gate", *FACTORS}
"""Options that new layers inherit from the layers that they replace."""


def linear_layers(
    teacher: LanguageModelConfig, attention: str | Sequence[str], keep: Sequence[str] = ()
) -> LanguageModelConfig:
    """The teacher's architecture with another mechanism in all layers of attention with keys and
    values of single tokens, but those to keep. Layers whose state is a matrix, and short
    convolutions, stay as they are.

    Options that both mechanisms have, such as the number of key/value heads, are the teacher's,
    unless they are given. The values of `log` are linear, unless given. `qk_norm` becomes an option
    of the layers, since new ones may not have it.

    Args:
      teacher: the teacher's architecture.
      attention: `mechanism:option=value,...`, or a pattern of several, which is repeated over all
        layers.
      keep: indices or slices of layers that stay as they are.

    Raises:
      UserError: the mechanism or an option is unknown, or a layer to keep does not exist.

    Examples:
      >>> teacher = LanguageModelConfig(block="llama", attention="softmax", num_layers=4)
      >>> [str(layer) for layer in linear_layers(teacher, "taylor", ["3::4"]).layers]
      ['taylor', 'taylor', 'taylor', 'softmax']
    """
    pattern = single_layers(parse_pattern([attention] if isinstance(attention, str) else attention))
    if any(layer.norm_after or not layer.has_mlp for layer in pattern):
        raise UserError(
            f"attention={attention!r}: norms and MLPs stay where the teacher has them; leave out "
            "norm_after and has_mlp"
        )
    if any("+" in x for x in (*(layer.mechanism for layer in pattern), *teacher.layer_pattern)):
        raise UserError(
            f"attention={attention!r}: layers with mechanisms in parallel cannot be replaced, nor "
            "replace others; choose another teacher or mechanism"
        )
    teacher = _norms_as_options(teacher)
    kept = {layer for index in keep for layer in _indices(index, teacher.num_layers)}
    old, modules = teacher.layers, teacher.abstract_layers()
    pairs = []  # layers with equal pairs share a stack: all or none have the teacher's weights
    for layer in range(teacher.num_layers):
        index = layer % len(old)
        new = old[index]
        if layer not in kept and not isinstance(modules[index], RECURRENT):
            replaced = _replaced(teacher, modules[index], pattern[layer % len(pattern)])
            new = replace(replaced, norm_after=new.norm_after, has_mlp=new.has_mlp)
        pairs.append((new, old[index]))
    return replace(teacher, attention=tuple(layer for layer, _ in shortest_period(pairs)))


def with_lora(model: LanguageModelConfig, rank: int) -> LanguageModelConfig:
    """The same architecture with low-rank additions to the projections of all attention layers.

    Raises:
      UserError: a mechanism has no option `lora_rank`.
    """
    for layer, config in zip(model.layers, model.mechanisms(), strict=True):
        if not hasattr(config, "lora_rank"):
            raise UserError(f"lora_rank={rank}: {layer.mechanism} has no LoRA; leave it out")
    return replace(
        model,
        attention=tuple(
            replace(layer, options={**layer.options, "lora_rank": rank}) for layer in model.layers
        ),
    )


def without_lora(model: LanguageModel) -> LanguageModel:
    """Add low-rank additions to their matrices: W + A B, with parameters in at least float32, on
    this host. The model computes the same function of the tokens."""
    layers = (
        replace(x, options={k: v for k, v in x.options.items() if not k.endswith("lora_rank")})
        for x in model.config.layers
    )
    wider: Any = wide(model.config.param_dtype).name
    config = replace(model.config, attention=tuple(layers), lora_rank=None, param_dtype=wider)
    graph, state = nnx.split(LanguageModel.abstract(config))
    weights, values = flatten_with_names(nnx.state(model, nnx.Param)), []
    for name, leaf in flatten_with_names(state).items():
        value = np.asarray(weights[name]).astype(leaf.dtype)
        place = name.removesuffix("kernel.value") + "lora.lora_"
        if name.endswith(".kernel.value") and f"{place}a.value" in weights:
            low, high = (np.asarray(weights[f"{place}{x}.value"], leaf.dtype) for x in "ab")
            value = value + low @ high
        values.append(value)
    return nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), values))


def _norms_as_options(model: LanguageModelConfig) -> LanguageModelConfig:
    """The same architecture, with `qk_norm` as an option of its layers."""
    if not model.qk_norm:
        return model
    layers = (replace(x, options={"query_key_norm": True, **x.options}) for x in model.layers)
    return replace(model, qk_norm=False, attention=tuple(layers))


def _indices(index: str, num_layers: int) -> list[int]:
    """The layers of an index or a slice."""
    try:
        numbers = [int(part) if part else None for part in index.split(":")]
        if len(numbers) == 1 and numbers[0] is not None:
            return [range(num_layers)[numbers[0]]]
        if 2 <= len(numbers) <= 3 and (indices := [*range(num_layers)[slice(*numbers)]]):
            return indices
    except (ValueError, IndexError):
        pass
    raise UserError(
        f"keep={index!r}: no such layers of {num_layers}; give indices from 0, or slices such as "
        "3::4"
    )


def _replaced(teacher: LanguageModelConfig, old: Attention, chosen: Layers) -> Layers:
    """The layer that replaces `old`, a layer of the teacher without weights."""
    options = {**chosen.options}
    if chosen.mechanism == "log":
        options.setdefault("values", "linear")
    try:
        new = _layer(teacher, Layers(chosen.mechanism, options=options))
        ours, theirs = ({field.name for field in fields(x.config)} for x in (new, old))
        for name, default in FACTORS.items():
            if name not in ours and getattr(old.config, name, default) != default:
                raise ValueError(
                    f"the teacher's layers have {name}={_option(old, name)}, but "
                    f"{chosen.mechanism} has no such option; choose another mechanism"
                )
        for name in sorted(ours & theirs & COPIED - options.keys()):
            if (value := _option(old, name)) != _option(new, name):
                options[name] = value
        replaced = Layers(chosen.mechanism, options=options)
        _layer(teacher, replaced)  # raises if the sizes do not fit
        return replaced
    except ValueError as error:
        raise UserError(f"attention={str(chosen)!r}: {explain(error)}") from None


def _layer(model: LanguageModelConfig, layer: Layers) -> Attention:
    """A layer in a model, without weights."""
    return replace(model, attention=layer).abstract_layers()[0]


def _option(layer: Attention, name: str) -> FieldValue:
    """An option of a layer, with the defaults of sizes resolved."""
    is_size = name in ("num_kv_heads", "key_depth", "value_depth")
    return getattr(layer if is_size else layer.config, name)


class _Place(NamedTuple):
    """A parameter, or one layer of it in a stack of layers, or some of its columns."""

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
    """The parameters that a model has in common with another one, by their names in the model, in
    the memory of this host.

    Layers are matched by their index, so that the layer patterns may differ, and parameters by
    their name and shape within the layer; attention layers with other head dimensions, or another
    number of key/value heads, have nothing in common. Queries, keys and values that the source
    projects in one product and the model in three are columns of the source's matrix.

    Args:
      config: the architecture.
      source: a model of the same architecture, except for its attention layers.

    Raises:
      UserError: the architectures differ elsewhere, or only some of the layers that share a place
        of the layer pattern have a parameter of the source; the message names it.

    Examples:
      >>> config = LanguageModelConfig(vocab_size=8, model_dim=8, num_layers=2, num_heads=2)
      >>> source = LanguageModel(config, rngs=nnx.Rngs(0))
      >>> len(shared_weights(config, source)) == len(flatten_with_names(nnx.state(source)))
      True
    """
    if _additions(source.config) not in ({}, _additions(config)):
        source = without_lora(source)
    weights = flatten_with_names(jax.tree.map(np.asarray, nnx.state(source, nnx.Param)))
    shared = {}
    for name, (leaf, places) in _matched(config, source.config).items():
        parts = [place.value(weights) for place in places]
        if parts:
            value = parts[0] if places[0].layer is None else np.stack(parts)
            shared[name] = value.astype(leaf.dtype)
    return shared


def _additions(config: LanguageModelConfig) -> dict[str, tuple[int, ...]]:
    """The shapes of the low-rank additions by name."""
    return {name: x.shape for name, x in _parameters(config).items() if LORA in name}


@cache
def new_parameters(config: LanguageModelConfig, source: LanguageModelConfig) -> frozenset[str]:
    """Names of the parameters of a model of the architecture `config` that a model of the
    architecture `source` does not have.

    Raises:
      UserError: as `shared_weights`.
    """
    return frozenset(name for name, (_, places) in _matched(config, source).items() if not places)


def unused_parameters(config: LanguageModelConfig, source: LanguageModelConfig) -> frozenset[str]:
    """Names of the parameters of a model of the architecture `source` that a model of the
    architecture `config` does not have, at least in some layers.

    Raises:
      UserError: as `shared_weights`.
    """
    pairs = _matched(config, source).values()
    used = {(place.name, place.layer) for _, places in pairs for place in places}
    unused = set()
    for name, leaf in _parameters(source).items():
        layers = range(leaf.shape[0]) if _IN_BLOCK.fullmatch(name) else [None]
        if any((name, layer) not in used for layer in layers):
            unused.add(name)
    return frozenset(unused)


def layers_without_positions(
    config: LanguageModelConfig, source: LanguageModelConfig
) -> frozenset[str]:
    """Names of the mechanisms that have no position encoding in layers where the model of the
    architecture `source` has one."""
    ours, theirs = config.mechanisms(), source.mechanisms()
    names = config.layer_pattern
    return frozenset(
        names[layer % len(ours)]
        for layer in range(config.num_layers)
        if getattr(theirs[layer % len(theirs)], "positions", "none") != "none"
        and getattr(ours[layer % len(ours)], "positions", "none") == "none"
    )


def _matched(
    config: LanguageModelConfig, source: LanguageModelConfig
) -> dict[str, tuple[jax.ShapeDtypeStruct, list[_Place]]]:
    """The parameters of a model by name, each with its places in a model of the architecture
    `source`: one for each layer of a stack, and none if that model does not have it."""
    pair = config.resolved, source.resolved
    for field in fields(config):
        ours, theirs = (getattr(x, field.name) for x in pair)
        if field.name not in MAY_DIFFER and ours != theirs:
            raise UserError(
                f"model.{field.name}={ours!r} differs from {theirs!r} of the model with the "
                "weights; make them equal; only attention layers may differ"
            )
    known = _parameters(source)
    layers, source_layers = config.abstract_layers(), source.abstract_layers()
    matched: dict[str, tuple[jax.ShapeDtypeStruct, list[_Place]]] = {}
    for name, leaf in _parameters(config).items():
        if (in_block := _IN_BLOCK.fullmatch(name)) is None:
            places, shape = [_Place(name)], leaf.shape
        else:
            places, shape = [], leaf.shape[1:]
            first, period = int(in_block[1]), len(source_layers)
            for layer in range(first, config.num_layers, len(layers)):
                pair = layers[first], source_layers[layer % period]
                rest, columns = _in_layer(in_block[2], *pair)
                places.append(_Place(f"blocks.{layer % period}.{rest}", layer // period, columns))
        is_known = [place.shape(known) == shape for place in places]
        if any(is_known) and not all(is_known):
            raise UserError(
                f"model.attention: only some of the layers of {name.removesuffix('.value')} have "
                "weights in the other model; repeat the pattern up to "
                f"{math.lcm(len(layers), len(source_layers))} layers"
            )
        matched[name] = leaf, places if all(is_known) else []
    return matched


def _in_layer(name: str, ours: Attention, theirs: Attention) -> tuple[str, np.ndarray | None]:
    """The name that a parameter of a layer has in the source's layer, empty if the source cannot
    have it; and its columns, if it is a part of a matrix."""
    if not name.startswith("attention."):
        return name, None
    if isinstance(ours, ParallelAttention):
        _, part, rest = name.split(".", 2)
        if not isinstance(theirs, ParallelAttention) or part not in theirs.parts:
            return "", None
        rest, columns = _in_layer(f"attention.{rest}", ours.parts[part], theirs.parts[part])
        return rest and f"attention.{part}.{rest.removeprefix('attention.')}", columns
    if isinstance(ours, MatrixStateAttention) and isinstance(theirs, MatrixStateAttention):
        sizes = ((x.num_heads, x.num_key_heads, x.key_depth, x.value_depth) for x in (ours, theirs))
        return name if len({*sizes}) == 1 else "", None
    if not isinstance(theirs, HeadedAttention):
        return name, None
    if isinstance(ours, HeadedAttention) and ours.sizes != theirs.sizes:
        return "", None  # equal shapes would belong to other heads
    if not isinstance(ours, MatrixStateAttention):
        return name, None
    sizes = ours.num_heads, ours.num_key_heads, ours.key_depth, ours.value_depth
    if sizes != (theirs.num_heads, theirs.num_heads, *theirs.sizes[2:]):
        return "", None
    part = _PART.fullmatch(name)
    if part is None:
        return name, None
    if part[1] not in ours.softmax_projections:
        return "", None
    return f"attention.project{part[2]}", theirs.columns()[part[1]]


@cache
def _parameters(config: LanguageModelConfig) -> Mapping[str, jax.ShapeDtypeStruct]:
    """The shapes and dtypes of the parameters by name."""
    return flatten_with_names(nnx.state(LanguageModel.abstract(config), nnx.Param))
