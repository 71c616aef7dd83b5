"""Names and layouts of tensors in transformers, for parameters of this package."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from heinsen_jax.models import LanguageModelConfig

Tensors: TypeAlias = list[np.ndarray]


@dataclass(frozen=True)
class Heads:
    """Sizes of attention, for layouts of its projections.

    Attributes:
      num_heads, num_kv_heads: numbers of query heads and of key/value heads.
      depth: head dimension.
      rotated: number of rotated features of a head.
    """

    num_heads: int
    num_kv_heads: int
    depth: int
    rotated: int

    @classmethod
    def of(cls, config: LanguageModelConfig) -> "Heads":
        layer: Any = config.abstract_layers()[0]
        is_rotary = getattr(layer.config, "positions", None) == "rotary"
        rotated = layer.config.rotated(layer.key_depth) if is_rotary else 0
        return cls(config.num_heads, layer.num_kv_heads, layer.key_depth, rotated)

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
    """Maps between a parameter and its tensors in transformers."""

    to_ours: Callable[[Tensors, Heads], np.ndarray]
    to_theirs: Callable[[np.ndarray, Heads], Tensors]


def _interleaved(x: np.ndarray, heads: Heads) -> Tensors:
    """Queries, keys and values of GPT-NeoX, adjacent for each head."""
    shape = x.shape[1:]
    parts = np.moveaxis(x.reshape(heads.num_heads, 3, heads.depth, *shape), 1, 0)
    return [part.reshape(-1, *shape) for part in parts]


def _interleave(parts: Tensors, heads: Heads) -> np.ndarray:
    shape = parts[0].shape[1:]
    apart = [x.reshape(heads.num_heads, heads.depth, *shape) for x in parts]
    return np.stack(apart, 1).reshape(-1, *shape)


Names: TypeAlias = Mapping[str, tuple[str, Layout]]

SAME = Layout(lambda x, heads: x[0], lambda x, heads: [x])
DENSE = Layout(lambda x, heads: x[0].T, lambda x, heads: [x.T])
NORM_OF_HEAD = Layout(
    lambda x, heads: x[0][heads.order], lambda x, heads: [x[np.argsort(heads.order)]]
)
SEPARATE = Layout(lambda x, heads: heads.join(*x).T, lambda x, heads: heads.split(x.T))
INTERLEAVED = Layout(
    lambda x, heads: heads.join(*_interleaved(x[0], heads)).T,
    lambda x, heads: [_interleave(heads.split(x.T), heads)],
)
THIRDS = Layout(
    lambda x, heads: heads.join(*np.split(x[0].T, 3)).T,
    lambda x, heads: [np.concatenate(heads.split(x.T)).T],
)
"""Layouts. PyTorch's linear layers have the transpose of our kernels; GPT-2's layers do not."""

# Module of this package -> (module in transformers, layout). A name with {} exists once per layer;
# one with * is q, k and v.
LLAMA: Names = {
    "embed": ("model.embed_tokens", SAME),
    "unembed": ("lm_head", SAME),
    "norm": ("model.norm", SAME),
    "blocks.0.norm": ("model.layers.{}.input_layernorm", SAME),
    "blocks.0.attention.project": ("model.layers.{}.self_attn.*_proj", SEPARATE),
    "blocks.0.attention.query_norm": ("model.layers.{}.self_attn.q_norm", NORM_OF_HEAD),
    "blocks.0.attention.key_norm": ("model.layers.{}.self_attn.k_norm", NORM_OF_HEAD),
    "blocks.0.attention.output": ("model.layers.{}.self_attn.o_proj", DENSE),
    "blocks.0.mlp_norm": ("model.layers.{}.post_attention_layernorm", SAME),
    "blocks.0.mlp.gate": ("model.layers.{}.mlp.gate_proj", DENSE),
    "blocks.0.mlp.up": ("model.layers.{}.mlp.up_proj", DENSE),
    "blocks.0.mlp.down": ("model.layers.{}.mlp.down_proj", DENSE),
}
GPT2: Names = {
    "embed": ("transformer.wte", SAME),
    "unembed": ("lm_head", SAME),
    "position": ("transformer.wpe", SAME),
    "norm": ("transformer.ln_f", SAME),
    "blocks.0.norm": ("transformer.h.{}.ln_1", SAME),
    "blocks.0.attention.project": ("transformer.h.{}.attn.c_attn", THIRDS),
    "blocks.0.attention.output": ("transformer.h.{}.attn.c_proj", SAME),
    "blocks.0.mlp_norm": ("transformer.h.{}.ln_2", SAME),
    "blocks.0.mlp.up": ("transformer.h.{}.mlp.c_fc", SAME),
    "blocks.0.mlp.down": ("transformer.h.{}.mlp.c_proj", SAME),
}
GPT_NEOX: Names = {
    "embed": ("gpt_neox.embed_in", SAME),
    "unembed": ("embed_out", SAME),
    "norm": ("gpt_neox.final_layer_norm", SAME),
    "blocks.0.norm": ("gpt_neox.layers.{}.input_layernorm", SAME),
    "blocks.0.attention.project": ("gpt_neox.layers.{}.attention.query_key_value", INTERLEAVED),
    "blocks.0.attention.output": ("gpt_neox.layers.{}.attention.dense", DENSE),
    "blocks.0.mlp_norm": ("gpt_neox.layers.{}.post_attention_layernorm", SAME),
    "blocks.0.mlp.up": ("gpt_neox.layers.{}.mlp.dense_h_to_4h", DENSE),
    "blocks.0.mlp.down": ("gpt_neox.layers.{}.mlp.dense_4h_to_h", DENSE),
}
NAMES: dict[str, Names] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral"), LLAMA),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
}
"""Names by `model_type`."""


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

    def shapes(self, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes of all tensors of a parameter of this shape."""
        like = np.zeros(shape[1:] if self.is_stacked else shape, bool)
        theirs = [x.shape for x in self.layout.to_theirs(like, self.heads)]
        for names in self.layers:
            yield from zip(names, theirs, strict=True)

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


def entries(names: Names, config: LanguageModelConfig, paths: Iterable[str]) -> list[Entry]:
    """The parameters of a model by their paths, with their tensors in another library."""
    heads, parameters = Heads.of(config), []
    for path in paths:
        module, _, leaf = path.removesuffix(".value").rpartition(".")
        theirs, layout = names[module]
        name = f"{theirs}.{'bias' if leaf == 'bias' else 'weight'}"
        parts = [name.replace("*", x) for x in "qkv"] if "*" in name else [name]
        is_stacked = "{}" in name
        layers = range(config.num_layers if is_stacked else 1)
        each = [[part.format(layer) for part in parts] for layer in layers]
        parameters.append(Entry(path, each, is_stacked, layout, heads))
    return parameters
