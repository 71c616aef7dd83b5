"""Layouts of tensors in other libraries, for parameters of this package."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from heinsen_jax.attention.matrix_state import MatrixStateAttention
from heinsen_jax.attention.registry import parts_of
from heinsen_jax.attention.short_convolution import ShortConvolution
from heinsen_jax.models import LanguageModelConfig

Tensors: TypeAlias = list[np.ndarray]
_IN_BLOCK = re.compile(r"blocks\.(\d+)\.(.*)")


@dataclass(frozen=True)
class Heads:
    """Sizes of attention, for layouts of its projections.

    Attributes:
      num_heads, num_kv_heads: numbers of query heads and of key/value heads.
      depth: head dimension of queries and keys.
      widths: numbers of features of all queries, keys and values.
      rotated: number of rotated features of a head.
    """

    num_heads: int
    num_kv_heads: int
    depth: int
    widths: tuple[int, int, int]
    rotated: int

    @classmethod
    def of(cls, layer: Any) -> "Heads":
        """The sizes of a layer; a short convolution counts as one head."""
        if isinstance(layer, ShortConvolution):
            width = layer.model_dim
            return cls(1, 1, width, (width, width, width), 0)
        is_rotary = getattr(layer.config, "positions", None) == "rotary"
        rotated = layer.config.rotated(layer.key_depth) if is_rotary else 0
        if isinstance(layer, MatrixStateAttention):  # queries and keys have as many heads
            queries, keys, values = layer.num_key_heads, layer.num_key_heads, layer.num_heads
        else:
            queries, keys, values = layer.num_heads, layer.num_kv_heads, layer.num_kv_heads
        depth = layer.key_depth
        widths = queries * depth, keys * depth, values * layer.value_depth
        return cls(layer.num_heads, keys, depth, widths, rotated)

    @property
    def order(self) -> np.ndarray:
        """Features of a head in our order: transformers rotates features i and i + rotated/2
        together, and we rotate adjacent ones."""
        pairs = np.arange(self.rotated).reshape(2, -1).T.ravel()
        return np.concatenate([pairs, np.arange(self.rotated, self.depth)])

    def join(self, query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
        """Rows of the fused projection, from rows `[heads * depth, ...]` of transformers."""
        shape = self.depth, *query.shape[1:]
        query, key = (x.reshape(-1, *shape)[:, self.order] for x in (query, key))
        groups = [x.reshape(self.num_kv_heads, -1, *shape[1:]) for x in (query, key, value)]
        return np.concatenate(groups, 1).reshape(-1, *shape[1:])

    def split(self, rows: np.ndarray) -> Tensors:
        """The inverse of `join`."""
        shape, back = rows.shape[1:], np.argsort(self.order)
        groups = rows.reshape(self.num_kv_heads, -1, self.depth, *shape)
        parts = groups[:, :-2][:, :, back], groups[:, -2:-1][:, :, back], groups[:, -1:]
        return [x.reshape(-1, *shape) for x in parts]


class Layout(NamedTuple):
    """Maps between a parameter and its tensors in transformers.

    Attributes:
      to_ours: the parameter.
      to_theirs: its tensors, or its part of a tensor that it shares with others.
      part: its place among the parameters that share a tensor.
      join: the tensor of all its parts.
    """

    to_ours: Callable[[Tensors, Heads], np.ndarray]
    to_theirs: Callable[[np.ndarray, Heads], Tensors]
    part: int = 0
    join: Callable[[Tensors, Heads], np.ndarray] = lambda parts, heads: np.concatenate(parts)


def _interleaved(x: np.ndarray, heads: Heads, count: int) -> Tensors:
    """Parts that are adjacent for each head: queries, keys and values, or queries and gates."""
    parts = np.moveaxis(x.reshape(heads.num_heads, count, -1, *x.shape[1:]), 1, 0)
    return [part.reshape(-1, *x.shape[1:]) for part in parts]


def _interleave(parts: Tensors, heads: Heads) -> np.ndarray:
    """The inverse of `_interleaved`."""
    shape = parts[0].shape[1:]
    apart = [x.reshape(heads.num_heads, -1, *shape) for x in parts]
    return np.stack(apart, 1).reshape(-1, *shape)


Names: TypeAlias = Mapping[str, tuple[str, Layout]]

SAME = Layout(lambda x, heads: x[0], lambda x, heads: [x])
DENSE = Layout(lambda x, heads: x[0].T, lambda x, heads: [x.T])
TAPS = Layout(lambda x, heads: x[0][:, 0].T, lambda x, heads: [x.T[:, None]])
NORM_OF_HEADS = Layout(
    lambda x, heads: x[0].reshape(-1, heads.depth)[:, heads.order].ravel(),
    lambda x, heads: [x.reshape(-1, heads.depth)[:, np.argsort(heads.order)].ravel()],
)
SEPARATE = Layout(lambda x, heads: heads.join(*x).T, lambda x, heads: heads.split(x.T))
INTERLEAVED = Layout(
    lambda x, heads: heads.join(*_interleaved(x[0], heads, 3)).T,
    lambda x, heads: [_interleave(heads.split(x.T), heads)],
)
THIRDS = Layout(
    lambda x, heads: heads.join(*np.split(x[0].T, 3)).T,
    lambda x, heads: [np.concatenate(heads.split(x.T)).T],
)
"""Layouts. PyTorch's linear layers have the transpose of our kernels; GPT-2's layers do not."""


Sizes: TypeAlias = Callable[[Heads], Sequence[int]]


def rows_of(part: int, sizes: int | Sizes, layout: Layout = DENSE) -> Layout:
    """The rows of one part of a fused tensor, with the layout of this part.

    Args:
      part: the index of the part.
      sizes: the number of equal parts, or the rows of each part.
      layout: the layout of the part.
    """

    def to_ours(x: Tensors, heads: Heads) -> np.ndarray:
        ends = sizes if isinstance(sizes, int) else np.cumsum(sizes(heads))
        return layout.to_ours([np.split(x[0], ends)[part]], heads)

    return Layout(to_ours, layout.to_theirs, part)


FUSED = Layout(
    lambda x, heads: heads.join(*np.split(x[0], np.cumsum(heads.widths[:2]))).T,
    lambda x, heads: [np.concatenate(heads.split(x.T))],
)
GATED = Layout(
    lambda x, heads: heads.join(_interleaved(x[0], heads, 2)[0], *x[1:]).T,
    lambda x, heads: heads.split(x.T),
    join=_interleave,
)
OUTPUT_GATE = Layout(
    lambda x, heads: _interleaved(x[0], heads, 2)[1].T, lambda x, heads: [x.T], 1, _interleave
)


@dataclass(frozen=True)
class Entry:
    """A parameter and its tensors.

    Attributes:
      path: its path in the model.
      layers: names of its tensors, for each layer if it is stacked.
      is_stacked: whether its first axis enumerates layers.
      layout: the maps between both.
      heads: sizes that the layout needs.
    """

    path: str
    layers: list[list[str]]
    is_stacked: bool
    layout: Layout
    heads: Heads

    def load(self, leaf: jax.ShapeDtypeStruct, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The parameter of a shape and dtype, from a function that reads tensors."""
        # Filled by layer, so that no tensor is in memory twice.
        value: np.ndarray = np.empty(leaf.shape, leaf.dtype)
        for part, names in zip(value if self.is_stacked else [value], self.layers, strict=True):
            part[...] = self.layout.to_ours([read(name) for name in names], self.heads)
        return value

    def tensors(self, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        """Names and values of the tensors of a parameter."""
        for names, part in zip(self.layers, value if self.is_stacked else [value], strict=True):
            yield from zip(names, self.layout.to_theirs(part, self.heads), strict=True)


def places_of(config: LanguageModelConfig) -> list[dict[str, int]]:
    """For each layer, the numbers `mixer` and `mlp` of attention and MLP if each counts as one."""
    count, places = 0, []
    for number in range(config.num_layers):
        has_mlp = config.layers[number % len(config.layers)].has_mlp
        places.append({"mixer": count, "mlp": count + has_mlp})
        count += 1 + has_mlp
    return places


def entries(names: Names, config: LanguageModelConfig, paths: Iterable[str]) -> list[Entry]:
    """The parameters of a model by their paths, with their tensors in another library."""
    layers, parameters, places = config.abstract_layers(), [], places_of(config)
    for path in paths:
        whole, index, kinds = path.removesuffix(".value"), 0, [""]
        if in_block := _IN_BLOCK.fullmatch(whole):
            index, whole = int(in_block[1]), in_block[2]
        parts = parts_of(config.layer_pattern[index], layers[index])
        within = (name for name in parts if whole.startswith(f"attention.{name}."))
        name = next(within, next(iter(parts)))
        if in_block:
            whole, kinds = (
                whole.replace(f"attention.{name}.", "attention."),
                [f"{name}.", "blocks."],
            )
        module, _, leaf = whole.rpartition(".")
        suffixes = {whole: "", module: ".bias" if leaf == "bias" else ".weight"}
        pairs = [(kind + x, suffix) for kind in kinds for x, suffix in suffixes.items()]
        if not (known := [pair for pair in pairs if pair[0] in names]):
            raise KeyError(f"{path} has no name in the other library")
        key, suffix = known[0]
        tensor = names[key][0] + suffix
        tensors = [tensor.replace("*", x) for x in "qkv"] if "*" in tensor else [tensor]
        is_stacked = "{" in tensor
        numbers = range(index, config.num_layers, len(layers)) if is_stacked else range(1)
        each = [[x.format(number, **places[number]) for x in tensors] for number in numbers]
        parameters.append(Entry(path, each, is_stacked, names[key][1], Heads.of(parts[name])))
    return parameters


def tensors_of(
    parameters: Iterable[Entry],
    values: Mapping[str, Any],
    convert: Callable[[str, np.ndarray], np.ndarray] = lambda name, x: x,
) -> dict[str, np.ndarray]:
    """All tensors by name, converted, for parameters by their paths."""
    parts: dict[str, list[tuple[Entry, np.ndarray]]] = {}
    for entry in parameters:
        for name, tensor in entry.tensors(np.asarray(values[entry.path])):
            parts.setdefault(name, []).append((entry, convert(name, tensor)))
    return {name: _joined(pairs) for name, pairs in parts.items()}


def _joined(pairs: list[tuple[Entry, np.ndarray]]) -> np.ndarray:
    if len(pairs) == 1:
        return pairs[0][1]
    ordered = sorted(pairs, key=lambda pair: pair[0].layout.part)
    entry, _ = ordered[0]
    return entry.layout.join([x for _, x in ordered], entry.heads)


def shapes_of(
    parameters: Iterable[Entry], leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors by name, for parameters of these shapes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for entry in parameters:
        shape = leaves[entry.path].shape
        like = np.broadcast_to(False, shape[1:] if entry.is_stacked else shape)
        theirs = [x.shape for x in entry.layout.to_theirs(like, entry.heads)]
        for name, (rows, *rest) in (
            x for names in entry.layers for x in zip(names, theirs, strict=True)
        ):
            shapes[name] = (shapes.get(name, (0,))[0] + rows, *rest)
    return shapes
