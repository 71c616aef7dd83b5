"""Base class of mechanisms with queries, keys and values: projections to heads and back."""

from collections.abc import Callable
from typing import Literal, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, StateT
from heinsen_jax.attention.parameters import (
    NORMS,
    LayerOptions,
    dense_options,
    linear,
    lora,
    scaled,
)
from heinsen_jax.typing import Array, Features, Float, Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class HeadsConfig(AttentionConfig):
    """Head dimensions and output projection."""

    num_kv_heads: pydantic.PositiveInt | None = None
    """Number of key/value heads, shared by groups of query heads; num_heads by default."""
    key_depth: pydantic.PositiveInt | None = None
    """Head dimension of queries and keys; model_dim / num_heads by default."""
    value_depth: pydantic.PositiveInt | None = None
    """Head dimension of values; model_dim / num_heads by default."""
    gated: bool = False
    """Whether a gated linear unit precedes the output projection, as in Heinsen's block."""
    query_key_norm: bool | Literal["joint"] = False
    """RMS norm of queries and keys, with a scale per feature: per head if true, over all heads
    together if joint, as in OLMo 2."""
    norm_epsilon: pydantic.PositiveFloat | None = None
    """Epsilon of the normalization of queries and keys; 1e-6 by default."""
    zero_centered_norm: bool = False
    """Whether the scales of these norms are 1 + w, for w initially 0, instead of w."""
    use_bias: bool = True
    """Whether the projections have biases."""
    output_bias: bool | None = None
    """Whether the output projection has a bias; as `use_bias` by default, never if it is gated."""
    output_multiplier: pydantic.PositiveFloat = 1.0
    """Factor of the output."""
    lora_rank: pydantic.PositiveInt | None = None
    """Rank of products A B that are added to the matrices of the projections to queries, keys,
    values and outputs, as in LoRA; B is initially 0. None are added when None."""

    def depths(self, model_dim: int, num_heads: int) -> tuple[int, int]:
        """`key_depth` and `value_depth`, with the defaults resolved."""
        return (
            self.key_depth or head_depth(model_dim, num_heads),
            self.value_depth or head_depth(model_dim, num_heads),
        )


HeadsT = TypeVar("HeadsT", bound=HeadsConfig)


class HeadedAttention(Attention[HeadsT, StateT]):
    """Projections to queries, keys and values, `attend`, and an output projection.

        q | k | v = x W1 + b1          for each key/value head, adjacent
        y = attend(q, k, v) W3 + b3    or, gated: GLU(attend(q, k, v) W2 + b2) W3

    without b1, b2 and b3 if `use_bias` is false (for b3, `output_bias`, if it is set), and with
    GLU(a, b) = a sigmoid(b). Weights and biases are initialized ~ U(+-1/sqrt(fan_in)).

    Raises:
      ValueError: model_dim is not a multiple of num_heads and a depth is None; num_heads is not a
        multiple of num_kv_heads; or `gated` and `output_bias` are both true.
    """

    Config = HeadsConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        chosen, model_dim, num_heads = self.config, self.model_dim, self.num_heads
        self.num_kv_heads = self.default_kv_heads()
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={num_heads}"
            )
        if chosen.gated and chosen.output_bias:
            raise ValueError("output_bias with gated=True: that projection has none; leave it out")
        self.key_depth, self.value_depth = chosen.depths(model_dim, num_heads)
        inner = num_heads * self.key_depth
        inner += self.num_kv_heads * (self.key_depth + self.value_depth)
        mixed = num_heads * self.value_depth
        biased = chosen.use_bias
        axes = "embed", "heads"
        rank = chosen.lora_rank
        self.project = HeadProjection(
            model_dim, inner, axes, use_bias=biased, lora_rank=rank, **options
        )
        if chosen.query_key_norm:
            is_joint, epsilon = chosen.query_key_norm == "joint", chosen.norm_epsilon
            norm = NORMS["zero_centered_rms" if chosen.zero_centered_norm else "rms"]
            self.query_norm, self.key_norm = (
                norm(heads * self.key_depth, epsilon=epsilon, **options)
                for heads in ((num_heads, self.num_kv_heads) if is_joint else (1, 1))
            )
        if chosen.gated:
            self.gate = linear(mixed, 2 * model_dim, axes[::-1], use_bias=biased, **options)
            output = model_dim, model_dim, ("mlp", "embed")
            self.output = linear(*output, use_bias=False, lora_rank=rank, **options)
        else:
            biased = biased if chosen.output_bias is None else chosen.output_bias
            output = mixed, model_dim, axes[::-1]
            self.output = linear(*output, use_bias=biased, lora_rank=rank, **options)

    def default_kv_heads(self) -> int:
        return self.config.num_kv_heads or self.num_heads

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[StateT]
    ) -> tuple[Mixed, StateT | None]:
        """The mechanism: returns `[..., T, N, V]`, and the new state if the call has one."""
        raise NotImplementedError

    def apply(self, x: Features, call: CallArguments[StateT]) -> tuple[Features, StateT | None]:
        query, key, value = self.heads(x, call.source)
        with jax.named_scope("mechanism"):
            y, state = self.attend(query, key, value, call)
        return self.out_proj(self.apply_output_gate(x, y)), state

    def apply_output_gate(self, x: Features, y: Mixed) -> Mixed:
        """The outputs of heads `[..., T, N, V]`, multiplied by a gate of the layer's input, if the
        mechanism has one."""
        del x
        return y

    def heads(
        self,
        x: Features,
        source: Float[Array, "*B S D"] | None = None,
        project: "HeadProjection | None" = None,
    ) -> tuple[Query, Keys, Values]:
        """Queries `[..., T, N, K]` of x; keys `[..., S, G, K]` and values of x, or of a source."""
        query, key, value = (project or self.project).heads(x, source, *self.sizes)
        if self.config.query_key_norm:
            query, key = self._normed(self.query_norm, query), self._normed(self.key_norm, key)
        return query, key, value

    def _normed(self, norm: Callable[[Array], Array], x: Array) -> Array:
        """Queries or keys `[..., T, N, K]`, normalized by head or over all heads."""
        if self.config.query_key_norm != "joint":
            return norm(x)
        return norm(x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])).reshape(x.shape)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """num_heads, num_kv_heads, key_depth and value_depth."""
        return self.num_heads, self.num_kv_heads, self.key_depth, self.value_depth

    @property
    def token_shapes(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Shapes of a token's keys and values: (num_kv_heads, depth)."""
        return (self.num_kv_heads, self.key_depth), (self.num_kv_heads, self.value_depth)

    def columns(self) -> dict[str, np.ndarray]:
        """Columns of the matrix of `project` for the query, key and value of each of num_heads
        heads: `[N K]`, `[N K]`, `[N V]`. Columns of a key/value head are repeated in its
        group."""
        group = self.num_heads // self.num_kv_heads
        ends = group * self.key_depth, (group + 1) * self.key_depth
        by_head = np.arange(self.project.out_features).reshape(self.num_kv_heads, -1)
        query, key, value = np.split(by_head, ends, axis=1)
        shared = {"key": key, "value": value}
        repeated = {name: np.repeat(x, group, 0).ravel() for name, x in shared.items()}
        return {"query": query.ravel(), **repeated}

    def out_proj(self, y: Mixed) -> Features:
        """`[..., T, N, V]` -> `[..., T, D]`"""
        y = y.reshape(*y.shape[:-2], self.num_heads * self.value_depth)
        if self.config.gated:
            y = jax.nn.glu(self.gate(y))
        return scaled(self.config.output_multiplier, self.output(y))


class HeadProjection(nnx.Linear):
    """One matrix product for the queries, keys and values of all heads."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        logical_axes: tuple[str, str],
        *,
        use_bias: bool = True,
        lora_rank: int | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        dense = dense_options(inputs, logical_axes)
        super().__init__(inputs, outputs, use_bias=use_bias, **dense, **options)
        self.lora = lora(inputs, lora_rank, outputs, **options) if lora_rank else None

    def heads(
        self,
        x: Features,
        source: Float[Array, "*B S D"] | None,
        num_heads: int,
        num_kv_heads: int,
        key_depth: int,
        value_depth: int,
    ) -> tuple[Query, Keys, Values]:
        """Queries `[..., T, N, K]` of x, keys `[..., S, G, K]` and values of x or of a source."""
        query_width = num_heads // num_kv_heads * key_depth

        def apart(x: Array) -> Array:
            return x.reshape(*x.shape[:-1], num_kv_heads, x.shape[-1] // num_kv_heads)

        if source is None:
            parts = apart(self(x) + self.lora(x) if self.lora else self(x))
            query, rest = parts[..., :query_width], parts[..., query_width:]
        elif self.lora:
            raise NotImplementedError("lora_rank is unsupported with source; leave it out")
        else:
            query = self._part(x, apart, slice(None, query_width))
            rest = self._part(source, apart, slice(query_width, None))
        query = query.reshape(*query.shape[:-2], num_heads, key_depth)
        return query, rest[..., :key_depth], rest[..., key_depth:]

    def _part(self, x: Array, apart: Callable[[Array], Array], part: slice) -> Array:
        """The product with a slice of the columns of each key/value head."""
        kernel = apart(self.kernel[...])[..., part]
        dtype = self.dtype or x.dtype
        y = jnp.einsum("...d,dgf->...gf", x.astype(dtype), kernel.astype(dtype))
        if self.bias is None:
            return y
        bias = apart(self.bias[...])[..., part].astype(dtype)
        return y + jnp.broadcast_to(bias, y.shape)


def head_depth(model_dim: int, num_heads: int) -> int:
    """model_dim / num_heads, which must be an integer."""
    if num_heads < 1 or model_dim % num_heads:
        raise ValueError(
            f"num_heads={num_heads} does not divide model_dim={model_dim}: change one of them, or "
            "give key_depth and value_depth"
        )
    return model_dim // num_heads
