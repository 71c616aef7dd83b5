"""Names and layouts of tensors in transformers, for parameters of this package."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np

from heinsen_jax.attention.matrix_state import MatrixStateAttention
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


def _rows(part: int, of: int | Sizes, layout: Layout = DENSE) -> Layout:
    """The rows of one part of a fused tensor, with the layout of this part: of a number of equal
    parts, or of parts with these numbers of rows."""

    def to_ours(x: Tensors, heads: Heads) -> np.ndarray:
        ends = of if isinstance(of, int) else np.cumsum(of(heads))
        return layout.to_ours([np.split(x[0], ends)[part]], heads)

    return Layout(to_ours, layout.to_theirs, part)


def _qkv(heads: Heads) -> Sequence[int]:
    return heads.widths


def _convolved(heads: Heads) -> Sequence[int]:
    """Mamba-2's x, B and C."""
    return heads.widths[::-1]


def _projected(heads: Heads) -> Sequence[int]:
    """Mamba-2's z, x, B, C and dt."""
    return heads.widths[2], *heads.widths[::-1], heads.num_heads


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

# Module of this package -> (module in transformers, layout). A name with {} exists once per layer;
# {mixer} and {mlp} are numbers of layers where attention and MLP count as one each. One with * is
# q, k and v. Names of layers of one mechanism begin with it instead of "blocks". A
# key that ends with the name of a parameter has the name of a tensor.
LLAMA: Names = {
    "embed": ("model.embed_tokens", SAME),
    "unembed": ("lm_head", SAME),
    "norm": ("model.norm", SAME),
    "blocks.norm": ("model.layers.{}.input_layernorm", SAME),
    "blocks.attention.project": ("model.layers.{}.self_attn.*_proj", SEPARATE),
    "blocks.attention.query_norm": ("model.layers.{}.self_attn.q_norm", NORM_OF_HEADS),
    "blocks.attention.key_norm": ("model.layers.{}.self_attn.k_norm", NORM_OF_HEADS),
    "blocks.attention.output": ("model.layers.{}.self_attn.o_proj", DENSE),
    "blocks.mlp_norm": ("model.layers.{}.post_attention_layernorm", SAME),
    "blocks.mlp.gate": ("model.layers.{}.mlp.gate_proj", DENSE),
    "blocks.mlp.up": ("model.layers.{}.mlp.up_proj", DENSE),
    "blocks.mlp.down": ("model.layers.{}.mlp.down_proj", DENSE),
}
GPT2: Names = {
    "embed": ("transformer.wte", SAME),
    "unembed": ("lm_head", SAME),
    "position": ("transformer.wpe", SAME),
    "norm": ("transformer.ln_f", SAME),
    "blocks.norm": ("transformer.h.{}.ln_1", SAME),
    "blocks.attention.project": ("transformer.h.{}.attn.c_attn", THIRDS),
    "blocks.attention.output": ("transformer.h.{}.attn.c_proj", SAME),
    "blocks.mlp_norm": ("transformer.h.{}.ln_2", SAME),
    "blocks.mlp.up": ("transformer.h.{}.mlp.c_fc", SAME),
    "blocks.mlp.down": ("transformer.h.{}.mlp.c_proj", SAME),
}
GPT_NEOX: Names = {
    "embed": ("gpt_neox.embed_in", SAME),
    "unembed": ("embed_out", SAME),
    "norm": ("gpt_neox.final_layer_norm", SAME),
    "blocks.norm": ("gpt_neox.layers.{}.input_layernorm", SAME),
    "blocks.attention.project": ("gpt_neox.layers.{}.attention.query_key_value", INTERLEAVED),
    "blocks.attention.output": ("gpt_neox.layers.{}.attention.dense", DENSE),
    "blocks.mlp_norm": ("gpt_neox.layers.{}.post_attention_layernorm", SAME),
    "blocks.mlp.up": ("gpt_neox.layers.{}.mlp.dense_h_to_4h", DENSE),
    "blocks.mlp.down": ("gpt_neox.layers.{}.mlp.dense_4h_to_h", DENSE),
}
PHI3: Names = LLAMA | {
    "blocks.attention.project": ("model.layers.{}.self_attn.qkv_proj", FUSED),
    "blocks.mlp.gate": ("model.layers.{}.mlp.gate_up_proj", _rows(0, 2)),
    "blocks.mlp.up": ("model.layers.{}.mlp.gate_up_proj", _rows(1, 2)),
}
OLMO2: Names = LLAMA | {
    "blocks.norm": ("model.layers.{}.post_attention_layernorm", SAME),
    "blocks.mlp_norm": ("model.layers.{}.post_feedforward_layernorm", SAME),
}
DELTA = "model.layers.{}.linear_attn"
OLMO_HYBRID: Names = OLMO2 | {
    "gated_deltanet.norm": ("model.layers.{}.attention_layer_norm", SAME),
    "gated_deltanet.mlp_norm": ("model.layers.{}.feedforward_layer_norm", SAME),
    "gated_deltanet.attention.query": (f"{DELTA}.q_proj", DENSE),
    "gated_deltanet.attention.key": (f"{DELTA}.k_proj", DENSE),
    "gated_deltanet.attention.value": (f"{DELTA}.v_proj", DENSE),
    "gated_deltanet.attention.convolutions.0.taps": (f"{DELTA}.q_conv1d.weight", TAPS),
    "gated_deltanet.attention.convolutions.1.taps": (f"{DELTA}.k_conv1d.weight", TAPS),
    "gated_deltanet.attention.convolutions.2.taps": (f"{DELTA}.v_conv1d.weight", TAPS),
    "gated_deltanet.attention.decay": (f"{DELTA}.a_proj", DENSE),
    "gated_deltanet.attention.to_log_decay.log_rate": (f"{DELTA}.A_log", SAME),
    "gated_deltanet.attention.to_log_decay.bias": (f"{DELTA}.dt_bias", SAME),
    "gated_deltanet.attention.beta": (f"{DELTA}.b_proj", DENSE),
    "gated_deltanet.attention.gate": (f"{DELTA}.g_proj", DENSE),
    "gated_deltanet.attention.norm": (f"{DELTA}.o_norm", SAME),
    "gated_deltanet.attention.output": (f"{DELTA}.o_proj", DENSE),
}
QWEN3_5: Names = LLAMA | {
    "blocks.attention.project": ("model.layers.{}.self_attn.*_proj", GATED),
    "blocks.attention.output_gate": ("model.layers.{}.self_attn.q_proj", OUTPUT_GATE),
    "gated_deltanet.attention.query": (f"{DELTA}.in_proj_qkv", _rows(0, _qkv)),
    "gated_deltanet.attention.key": (f"{DELTA}.in_proj_qkv", _rows(1, _qkv)),
    "gated_deltanet.attention.value": (f"{DELTA}.in_proj_qkv", _rows(2, _qkv)),
    "gated_deltanet.attention.convolutions.0.taps": (
        f"{DELTA}.conv1d.weight",
        _rows(0, _qkv, TAPS),
    ),
    "gated_deltanet.attention.convolutions.1.taps": (
        f"{DELTA}.conv1d.weight",
        _rows(1, _qkv, TAPS),
    ),
    "gated_deltanet.attention.convolutions.2.taps": (
        f"{DELTA}.conv1d.weight",
        _rows(2, _qkv, TAPS),
    ),
    "gated_deltanet.attention.decay": (f"{DELTA}.in_proj_a", DENSE),
    "gated_deltanet.attention.to_log_decay.log_rate": (f"{DELTA}.A_log", SAME),
    "gated_deltanet.attention.to_log_decay.bias": (f"{DELTA}.dt_bias", SAME),
    "gated_deltanet.attention.beta": (f"{DELTA}.in_proj_b", DENSE),
    "gated_deltanet.attention.gate": (f"{DELTA}.in_proj_z", DENSE),
    "gated_deltanet.attention.norm": (f"{DELTA}.norm", SAME),
    "gated_deltanet.attention.output": (f"{DELTA}.out_proj", DENSE),
}
CONV = "model.layers.{}.conv"
LFM2: Names = LLAMA | {
    "norm": ("model.embedding_norm", SAME),
    "blocks.norm": ("model.layers.{}.operator_norm", SAME),
    "blocks.attention.query_norm": ("model.layers.{}.self_attn.q_layernorm", NORM_OF_HEADS),
    "blocks.attention.key_norm": ("model.layers.{}.self_attn.k_layernorm", NORM_OF_HEADS),
    "blocks.attention.output": ("model.layers.{}.self_attn.out_proj", DENSE),
    "blocks.mlp_norm": ("model.layers.{}.ffn_norm", SAME),
    "blocks.mlp.gate": ("model.layers.{}.feed_forward.w1", DENSE),
    "blocks.mlp.up": ("model.layers.{}.feed_forward.w3", DENSE),
    "blocks.mlp.down": ("model.layers.{}.feed_forward.w2", DENSE),
    "short_convolution.attention.input_gate": (f"{CONV}.in_proj", _rows(0, 3)),
    "short_convolution.attention.output_gate": (f"{CONV}.in_proj", _rows(1, 3)),
    "short_convolution.attention.value": (f"{CONV}.in_proj", _rows(2, 3)),
    "short_convolution.attention.convolution.taps": (f"{CONV}.conv.weight", TAPS),
    "short_convolution.attention.convolution.bias": (f"{CONV}.conv.bias", SAME),
    "short_convolution.attention.output": (f"{CONV}.out_proj", DENSE),
}


def _mamba2(module: str) -> Names:
    """Names of a layer of Mamba-2, a module of each layer."""
    convolutions = {
        f"mamba2.attention.convolutions.{index}.{leaf}": (
            f"{module}.conv1d.{name}",
            _rows(2 - index, _convolved, layout),
        )
        for index in range(3)
        for leaf, name, layout in (("taps", "weight", TAPS), ("bias", "bias", SAME))
    }
    projections = {
        f"mamba2.attention.{name}": (f"{module}.in_proj", _rows(part, _projected))
        for part, name in enumerate(("gate", "value", "key", "query", "step"))
    }
    return {
        **convolutions,
        **projections,
        "mamba2.attention.to_log_decay.log_rate": (f"{module}.A_log", SAME),
        "mamba2.attention.to_log_decay.bias": (f"{module}.dt_bias", SAME),
        "mamba2.attention.skip": (f"{module}.D", SAME),
        "mamba2.attention.norm": (f"{module}.norm", SAME),
        "mamba2.attention.output": (f"{module}.out_proj", DENSE),
    }


GRANITE_HYBRID: Names = {
    **LLAMA,
    **_mamba2("model.layers.{}.mamba"),
    "blocks.mlp.gate": ("model.layers.{}.shared_mlp.input_linear", _rows(0, 2)),
    "blocks.mlp.up": ("model.layers.{}.shared_mlp.input_linear", _rows(1, 2)),
    "blocks.mlp.down": ("model.layers.{}.shared_mlp.output_linear", DENSE),
}
MIXER, MLP = "backbone.layers.{mixer}", "backbone.layers.{mlp}"
NEMOTRON_H: Names = {
    **_mamba2(f"{MIXER}.mixer"),
    "embed": ("backbone.embeddings", SAME),
    "unembed": ("lm_head", SAME),
    "norm": ("backbone.norm_f", SAME),
    "blocks.norm": (f"{MIXER}.norm", SAME),
    "blocks.attention.project": (f"{MIXER}.mixer.*_proj", SEPARATE),
    "blocks.attention.output": (f"{MIXER}.mixer.o_proj", DENSE),
    "blocks.mlp_norm": (f"{MLP}.norm", SAME),
    "blocks.mlp.up": (f"{MLP}.mixer.up_proj", DENSE),
    "blocks.mlp.down": (f"{MLP}.mixer.down_proj", DENSE),
}
NAMES: dict[str, Names] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "mistral", "smollm3", "granite"), LLAMA),
    "gpt2": GPT2,
    "gpt_neox": GPT_NEOX,
    "qwen3_5_text": QWEN3_5,
    "phi3": PHI3,
    "olmo2": OLMO2,
    "olmo_hybrid": OLMO_HYBRID,
    "lfm2": LFM2,
    "granitemoehybrid": GRANITE_HYBRID,
    "nemotron_h": NEMOTRON_H,
}
"""Names by `model_type`."""
TEXT_PREFIXES: dict[str, str] = {"qwen3_5_text": "model.language_model."}
"""Beginnings of names, in place of "model.", in models of text and images."""
IGNORED: dict[str, tuple[str, ...]] = {
    "qwen3_5_text": ("model.visual.", "mtp."),
    "nemotron_h": ("mtp.",),
}
"""Beginnings of names of tensors that do not change the logits of text."""
OTHER_NAMES: dict[str, Names] = {
    "olmo_hybrid": {"blocks.norm": ("model.layers.{}.feedforward_layer_norm", SAME)}
}
"""Names by `model_type` that transformers writes instead of the published ones."""
DIVIDED: dict[str, str] = {"olmo_hybrid": f"{DELTA}.*_conv1d.weight"}
"""Tensors q, k and v among which transformers divides their rows equally, whatever their widths."""


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
            kinds = [config.layer_pattern[index] + ".", "blocks."]
        module, _, leaf = whole.rpartition(".")
        suffixes = {whole: "", module: ".bias" if leaf == "bias" else ".weight"}
        pairs = [(kind + x, suffix) for kind in kinds for x, suffix in suffixes.items()]
        if not (known := [pair for pair in pairs if pair[0] in names]):
            raise KeyError(f"{path} has no name in the other library")
        key, suffix = known[0]
        name = names[key][0] + suffix
        parts = [name.replace("*", x) for x in "qkv"] if "*" in name else [name]
        is_stacked = "{" in name
        numbers = range(index, config.num_layers, len(layers)) if is_stacked else range(1)
        each = [[part.format(number, **places[number]) for part in parts] for number in numbers]
        parameters.append(Entry(path, each, is_stacked, names[key][1], Heads.of(layers[index])))
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
