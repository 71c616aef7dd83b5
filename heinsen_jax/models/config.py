"""The architecture of a language model."""

import dataclasses
import math
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

import pydantic
from flax import nnx

from heinsen_jax.attention import AttentionConfig, configure, mechanism
from heinsen_jax.attention.base import Attention
from heinsen_jax.attention.heads import head_depth
from heinsen_jax.attention.registry import FieldValue, ParallelConfig, options_of_parts
from heinsen_jax.models.pattern import Layers, Pattern, single_layers
from heinsen_jax.typing import config_dataclass

RematPolicy = Literal["nothing_saveable", "dots_with_no_batch_dims_saveable"]
Positions = Literal["recurrence", "learned", "none"]
Norm = Literal["layer", "rms", "zero_centered_rms"]
Dtype = Literal["float32", "bfloat16", "float64"]
MLPKind = Literal["gelu", "gelu_tanh", "squared_relu", "swiglu", "geglu_tanh"]
GATED: Mapping[str, str] = {"swiglu": "silu", "geglu_tanh": "gelu_tanh"}
"""Kinds of gated MLPs, and the activations of their gates."""


class BlockDefaults(NamedTuple):
    """Defaults that a block kind gives to fields that the configuration leaves unset.

    Attributes:
      options: options of its mechanism; ignored by mechanisms without such options. Options in
        `LOG_OPTIONS` are for `log` alone.
      convolution_size, norm, use_bias: see `LanguageModelConfig`.
      positions: see `LanguageModelConfig`; the embedding style's when None.
      mlp: see `LanguageModelConfig`; no MLP when None.
      mlp_use_bias: whether the MLP has biases.
    """

    options: Mapping[str, FieldValue]
    convolution_size: int | None = None
    positions: Positions | None = None
    norm: Norm = "layer"
    mlp: MLPKind | None = "gelu"
    use_bias: bool = True
    mlp_use_bias: bool = True


LOG_OPTIONS = {"values", "decay"}
DECAY_OPTIONS = {"gated": False, "values": "linear", "decay": "head", "positions": "rotary"}
BLOCKS = {
    "paper": BlockDefaults({"gated": True}, mlp=None),
    "standard": BlockDefaults({"gated": False}),
    "decay": BlockDefaults(DECAY_OPTIONS, convolution_size=4, positions="none"),
    "fastformer": BlockDefaults({"gated": False}, mlp_use_bias=False),
    "llama": BlockDefaults(
        {"gated": False, "positions": "rotary"},
        positions="none",
        norm="rms",
        mlp="swiglu",
        use_bias=False,
        mlp_use_bias=False,
    ),
}


@config_dataclass
class LanguageModelConfig:
    """Architecture of a language model. The defaults are the 125M model of Heinsen (2024):
    124,879,872 parameters."""

    vocab_size: pydantic.PositiveInt = 50304
    """Number of rows of the embedding; at least the size of the tokenizer's vocabulary (gpt2:
    50257)."""
    model_dim: pydantic.PositiveInt = 768
    """Width of the residual stream."""
    num_layers: pydantic.PositiveInt = 24
    """Number of residual blocks."""
    attention: Pattern = "log"
    """Attention mechanism, such as log or softmax; `heinsen_jax.attention.names()` lists all.
    Several form a pattern that the model repeats. gqa+mamba2 are in parallel: a layer with the sum
    of their outputs. With options: `Layers`, on the command line log:repeats=3,decay=head."""
    block: Literal["paper", "standard", "decay", "fastformer", "llama"] = "paper"
    """paper: one gated residual branch. standard: attention, then an MLP, both pre-norm. decay: as
    standard, for log-attention with decay: a causal convolution of 4 tokens at the start of each
    branch instead of a position encoding, values of any sign and decay by head in `log`, and rotary
    queries and keys for mechanisms with an option `positions`. fastformer: as standard, without
    biases in the MLP; the residual stream continues from the normalized input of the attention.
    llama: as standard, with RMS norms, a SwiGLU MLP and no biases, and rotary positions for
    mechanisms that have them. The fields that follow replace single parts of a block."""
    norm: Norm | None = None
    """layer: layer normalization. rms: RMS normalization, without mean and bias. zero_centered_rms:
    the same with the scale 1 + w, for w initially 0, also in mechanisms with an option
    `zero_centered_norm`."""
    mlp: MLPKind | None = None
    """gelu: GELU(x W1) W2. gelu_tanh: the same with the approximation of GELU by tanh.
    squared_relu: max(x W1, 0)^2 W2. swiglu: (SiLU(x W1) * x W2) W3. geglu_tanh: the same
    with gelu_tanh. The paper's block has no MLP."""
    norm_epsilon: pydantic.PositiveFloat | None = None
    """Epsilon of all norms, including the norms in mechanisms with an option `norm_epsilon`. When
    None: 1e-5 for layer normalization, 1e-6 for RMS."""
    parallel_branches: bool = False
    """Whether attention and MLP have the same input, as in GPT-NeoX:
    x + attention(norm(x)) + mlp(norm'(x))."""
    mlp_ratio: pydantic.PositiveInt = 4
    """Width of the MLP divided by model_dim. A gated MLP has 2/3 of this width, so that it
    has as many parameters."""
    mlp_dim: pydantic.PositiveInt | None = None
    """Width of the MLP; by default from mlp_ratio, with a gate rounded up to a multiple of 16."""
    use_bias: bool | None = None
    """Whether the MLP has biases, and the projections of mechanisms with an option `use_bias`."""
    qk_norm: bool = False
    """Whether the queries and keys of each head are RMS-normalized; needs mechanisms with an option
    `query_key_norm`."""
    lora_rank: pydantic.PositiveInt | None = None
    """Rank of products A B, initially 0, that are added to projections of attention, except for
    those to decays, and to the MLP (Hu et al., 2021, LoRA, arXiv:2106.09685). Only A and B are
    trained; all other parameters are loaded from `training.start`. None are added when None."""
    tie_embeddings: bool = True
    """Whether the readout has the weights of the token embedding."""
    logit_soft_cap: pydantic.PositiveFloat | None = None
    """c: logits are replaced by c tanh(logits / c)."""
    logit_divisor: pydantic.PositiveFloat = 1.0
    """Number by which logits are divided, before the cap."""
    embedding_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the token embeddings in the input of the first layer."""
    residual_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the output of each residual branch: x + residual_multiplier attention(norm(x))."""
    mlp_gate_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the gate of an MLP before its activation."""
    mlp_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the output of the MLP."""
    embedding_style: Literal["paper", "fastformer"] = "paper"
    """Layers before the first and after the last block. paper: a recurrence (see `positions`)
    before, a norm after. fastformer: learned positions and a norm before; after, a bias, and
    logits scaled by 1/sqrt(model_dim)."""
    positions: Positions | None = None
    """Position encoding: none, learned vectors, or the paper's recurrence, which adds h_t =
    logaddexp(log sigmoid(u_t) + h_{t-1}, b_t). When None: none in the blocks decay and llama, else
    the embedding style's."""
    max_length: pydantic.PositiveInt | None = None
    """Maximum sequence length, in tokens, with learned positions; None with others."""
    trained_length: pydantic.PositiveInt | None = None
    """Number of positions that a pretrained model was trained on, if known; longer sequences are
    processed with a warning."""
    convolution_size: pydantic.PositiveInt | None = None
    """Kernel size, in tokens, of a causal depthwise convolution at the start of each residual
    branch. When None: 4 in the decay block, no convolution in the others."""
    is_causal: bool = True
    """Whether tokens attend only to themselves and earlier tokens, and the model is trained to
    predict the next token; else they attend to all, and it is trained to predict masked ones."""
    num_heads: pydantic.PositiveInt = 24
    """Number of attention heads of a layer."""
    key_depth: pydantic.PositiveInt | None = None
    """Head dimension of queries and keys; model_dim / num_heads when None."""
    value_depth: pydantic.PositiveInt | None = None
    """Head dimension of values; model_dim / num_heads when None."""
    dtype: Dtype = "float32"
    """Dtype of activations in matrix products, and of keys, values and tokens in states. The
    residual stream, and sums over tokens in states, are at least float32."""
    param_dtype: Dtype = "float32"
    """Dtype of matrices and embeddings. Vectors, such as biases, scales of norms and rates of
    decay, are at least float32."""
    remat: bool = False
    """Rematerialize: recompute each block in the backward pass, so that only the activations of one
    block are in memory. Often faster on CPUs, too, where allocating large buffers is slow."""
    remat_policy: RematPolicy = "nothing_saveable"
    """With `remat`, which intermediate results of a block are saved instead of recomputed: a policy
    of `jax.checkpoint_policies`."""

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("attention must name at least one mechanism")
        if self.num_layers % len(self.layers):
            raise ValueError(
                f"num_layers={self.num_layers} is not a multiple of the {len(self.layers)} layers "
                "of model.attention"
            )
        if (self.max_length is not None) != (self.position_kind == "learned"):
            raise ValueError(
                f"max_length={self.max_length} with positions={self.position_kind!r}; set it for "
                "learned positions, and only for those"
            )
        fields = ("mlp", "mlp_ratio", "mlp_dim", "mlp_multiplier")
        mlp_fields = [x for x in fields if getattr(self, x) != getattr(type(self), x)]
        if BLOCKS[self.block].mlp is None and mlp_fields:
            raise ValueError(
                f"{', '.join(mlp_fields)} with block={self.block!r}: that block has no MLP; leave "
                "it out, or choose block='standard'"
            )
        if self.mlp_gate_multiplier != 1 and self.mlp_kind not in GATED:
            raise ValueError(
                f"mlp_gate_multiplier={self.mlp_gate_multiplier}: the MLP has no gate; leave it "
                "out, or choose mlp='swiglu'"
            )
        if self.parallel_branches and self.block in ("paper", "fastformer"):
            raise ValueError(
                f"parallel_branches: unsupported with block={self.block!r}; choose "
                "block='standard', 'decay' or 'llama'"
            )
        if self.block == "fastformer" and any(layer.norm_after for layer in self.layers):
            raise ValueError(
                "norm_after: unsupported with block='fastformer', which continues from the norm; "
                "choose block='standard', 'decay' or 'llama'"
            )
        if self.convolution is not None and not self.is_causal:
            of = "convolution_size" if self.convolution_size else f"block={self.block!r}"
            raise ValueError(
                f"{of} with is_causal=False: convolutions are causal; use block='standard' and "
                "convolution_size=None"
            )
        self.mechanisms()  # raises for invalid options
        if self.key_depth is None or self.value_depth is None:
            head_depth(self.model_dim, self.num_heads)

    @property
    def position_kind(self) -> Positions:
        """Position encoding, with the defaults resolved."""
        default: Positions = "recurrence" if self.embedding_style == "paper" else "learned"
        return self.positions or BLOCKS[self.block].positions or default

    @property
    def norm_kind(self) -> Norm:
        """Normalization, with the defaults resolved."""
        return self.norm or BLOCKS[self.block].norm

    @property
    def mlp_kind(self) -> MLPKind | None:
        """MLP, with the defaults resolved; None without any."""
        return self.mlp or BLOCKS[self.block].mlp

    @property
    def mlp_width(self) -> int:
        """Width of the MLP, with the defaults resolved."""
        wide = self.mlp_ratio * self.model_dim
        if self.mlp_kind in GATED:
            wide = math.ceil(wide * 2 / 3 / 16) * 16
        return self.mlp_dim or wide

    @property
    def has_bias(self) -> bool:
        """Whether projections have biases, with the defaults resolved."""
        return BLOCKS[self.block].use_bias if self.use_bias is None else self.use_bias

    @property
    def convolution(self) -> int | None:
        """Kernel size of the convolutions, with the defaults resolved; None without any."""
        return self.convolution_size or BLOCKS[self.block].convolution_size

    @property
    def mlp_has_bias(self) -> bool:
        """Whether the MLP has biases, with the defaults resolved."""
        return BLOCKS[self.block].mlp_use_bias if self.use_bias is None else self.use_bias

    @property
    def resolved(self) -> "LanguageModelConfig":
        """The same architecture, with the defaults of the block as values, but for biases that the
        MLP and attention do not share."""
        is_shared = self.has_bias == self.mlp_has_bias
        return dataclasses.replace(
            self,
            positions=self.position_kind,
            norm=self.norm_kind,
            mlp=self.mlp_kind,
            mlp_dim=self.mlp_width if self.mlp_kind else None,
            mlp_ratio=LanguageModelConfig.mlp_ratio,
            use_bias=self.has_bias if is_shared else None,
            convolution_size=self.convolution,
        )

    @property
    def layers(self) -> tuple[Layers, ...]:
        """The layers of the pattern in `attention` one by one; the model repeats this pattern."""
        return single_layers(self.attention)

    @property
    def layer_pattern(self) -> tuple[str, ...]:
        """The mechanisms of `layers`."""
        return tuple(layer.mechanism for layer in self.layers)

    def warn_beyond_trained_length(self, length: int) -> None:
        """Warn, once, if a sequence is longer than in training."""
        if self.trained_length is not None and length > self.trained_length:
            warnings.warn(
                f"model.trained_length={self.trained_length}: a sequence is longer than in "
                "training, and results may be poor; use shorter ones",
                stacklevel=2,
            )

    def mechanisms(self) -> list[AttentionConfig]:
        """The configurations of `layers`."""
        return [self._mechanism(layer) for layer in self.layers]

    def abstract_layers(self) -> list[Attention]:
        """The modules of `layers`, without weights."""
        return [*_abstract_layers(self)]

    def _mechanism(self, layer: Layers) -> AttentionConfig:
        name = layer.mechanism
        if "+" in name:
            options = options_of_parts(name, layer.options)
            layers = {part: Layers(part, options=options[part]) for part in options}
            return ParallelConfig(parts={part: self._mechanism(x) for part, x in layers.items()})
        known = {field.name for field in dataclasses.fields(mechanism(name).Config)}
        asked = BLOCKS[self.block].options
        chosen = known & asked.keys() - (set() if name == "log" else LOG_OPTIONS)
        fields: dict[str, FieldValue] = {field: asked[field] for field in asked if field in chosen}
        if "use_bias" in known:
            fields["use_bias"] = self.has_bias
        if self.norm_epsilon is not None and "norm_epsilon" in known:
            fields["norm_epsilon"] = self.norm_epsilon
        if self.norm_kind == "zero_centered_rms" and "zero_centered_norm" in known:
            fields["zero_centered_norm"] = True
        if self.qk_norm:
            if "query_key_norm" not in known:
                raise ValueError(
                    f"qk_norm with attention={name!r}: that mechanism has no option "
                    "query_key_norm; set qk_norm=False"
                )
            fields["query_key_norm"] = True
        if self.lora_rank is not None:
            if "lora_rank" not in known:
                raise ValueError(
                    f"lora_rank with attention={name!r}: that mechanism has no option lora_rank; "
                    "set lora_rank=None"
                )
            fields["lora_rank"] = self.lora_rank
        sizes = {"key_depth": self.key_depth, "value_depth": self.value_depth}
        fields |= {field: size for field, size in sizes.items() if size is not None}
        made = configure(name, **fields | {**layer.options})
        if self.is_causal and not made.capabilities.causal:
            raise ValueError(
                f"attention={name!r} is not causal, and cannot predict the next token; choose a "
                "causal mechanism, or is_causal=False to train on masked tokens"
            )
        if not self.is_causal and not made.capabilities.bidirectional:
            raise ValueError(
                f"attention={name!r}, as configured, is causal only; set is_causal=True"
            )
        return made


@cache
def _abstract_layers(config: LanguageModelConfig) -> nnx.List[Attention]:
    def modules() -> nnx.List[Attention]:
        sizes, rngs = (config.model_dim, config.num_heads), nnx.Rngs(0)
        pairs = zip(config.layer_pattern, config.mechanisms(), strict=True)
        return nnx.List(mechanism(name)(*sizes, options, rngs=rngs) for name, options in pairs)

    return nnx.eval_shape(modules)
