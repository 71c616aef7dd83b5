"""Base class of mechanisms whose state is a matrix per head: linear attention with gates and the
delta rule."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, TypedDict, TypeVar, Unpack, cast

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention import devices
from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, Capabilities
from heinsen_jax.attention.convolution import CausalConvolution
from heinsen_jax.attention.parameters import (
    LayerOptions,
    LowRank,
    RMSNorm,
    in_float32,
    inverse_softplus_of_log_uniform,
    linear,
    log_of_uniform,
    parameter,
)
from heinsen_jax.ops.gated_delta_rule import MatrixState, gated_delta_rule, matrix_summary
from heinsen_jax.ops.mlstm import MLSTMState
from heinsen_jax.typing import Array, Features, Float, Integer, config_dataclass, exported_tuple

OfHeads = Float[Array, "*B T N _"]
HeadsAndStates: TypeAlias = tuple[OfHeads, OfHeads, OfHeads, tuple[Array, ...]]


@config_dataclass
class MatrixStateConfig(AttentionConfig):
    """Head dimensions; subclasses set the attributes.

    Attributes:
      key_width: width of the keys of all heads together, as a multiple of model_dim.
      value_width: width of the values, likewise.
      depth_multiple: default head dimensions are multiples of it.
      has_erasure: whether the mechanism erases, which `flops` counts as one more product.
    """

    key_width: ClassVar[float] = 1.0
    value_width: ClassVar[float] = 1.0
    depth_multiple: ClassVar[int] = 1
    has_erasure: ClassVar[bool] = False

    key_depth: pydantic.PositiveInt | None = None
    """Head dimension of queries and keys; by default the published multiple of model_dim / number
    of heads of values, rounded."""
    value_depth: pydantic.PositiveInt | None = None
    """Head dimension of values; by default the published multiple of model_dim / number of heads of
    values, rounded."""
    norm_epsilon: pydantic.PositiveFloat | None = None
    """Epsilon of the norm of the outputs; 1e-6 by default."""
    output_gate: Literal["feature", "head"] | None = None
    """Whether the output has a gate by feature or by head of the values; the published one when
    None."""
    gate_activation: Literal["silu", "sigmoid"] | None = None
    """Activation of the output gate; the published one, or SiLU, when None."""
    lora_rank: pydantic.PositiveInt | None = None
    """Rank of products A B that are added to the matrices of the projections to queries, keys,
    values, output gates and outputs, as in LoRA; B is initially 0. None are added when None."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, streaming=True, segments=True, mergeable=True)

    def depths(self, model_dim: int, num_heads: int) -> tuple[int, int]:
        """`key_depth` and `value_depth`, with the defaults resolved."""

        def default(width: float) -> int:
            multiple = self.depth_multiple
            return max(round(width * model_dim / num_heads / multiple), 1) * multiple

        return (
            self.key_depth or default(self.key_width),
            self.value_depth or default(self.value_width),
        )

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        num_heads = getattr(self, "num_value_heads", None) or num_heads
        key_depth, value_depth = self.depths(model_dim, num_heads)
        return (6.0 if self.has_erasure else 4.0) * num_heads * key_depth * value_depth


@config_dataclass
class ConvolvedConfig(MatrixStateConfig):
    """Head dimensions, and convolutions of queries, keys and values."""

    convolution_size: pydantic.NonNegativeInt = 4
    """Kernel size, in tokens, of the causal depthwise convolutions of queries, keys and values,
    which SiLU follows; SiLU alone if 0."""
    num_key_heads: pydantic.PositiveInt | None = None
    """Number of heads of queries and keys, each shared by num_value_heads / num_key_heads heads of
    values; num_value_heads when None."""
    num_value_heads: pydantic.PositiveInt | None = None
    """Number of heads of values; num_heads when None."""


class Gates(TypedDict, total=False):
    """Gates of `gated_delta_rule` or `mlstm_attention`, by their argument names."""

    log_decay: Float[Array, "*B T N"] | Float[Array, "*B T N K"]
    erase: Float[Array, "*B T N"] | Float[Array, "*B T N K"]
    write: Float[Array, "*B T N"] | Float[Array, "*B T N V"]
    erase_key: Float[Array, "*B T N K"]
    log_input_gate: Float[Array, "*B T N"]
    log_forget_gate: Float[Array, "*B T N"]


@exported_tuple
class MatrixStates(NamedTuple):
    """State of a layer.

    Attributes:
      matrix: state of the mechanism.
      convolutions: the last inputs of the convolutions of queries, keys and values, if any.
      num_tokens: number of tokens so far, a scalar, for position encodings; None without any.
    """

    matrix: MatrixState | MLSTMState
    convolutions: tuple[Float[Array, "*B last _"], ...] = ()
    num_tokens: Integer[Array, ""] | None = None


def delta_rule(
    *arrays: Array,
    initial_state: MatrixState | None = None,
    return_state: bool = False,
    **options: Any,
) -> Any:
    """`gated_delta_rule` with a `MatrixState`."""
    if initial_state is not None:
        options["initial_state"] = initial_state.matrix
    y, matrix = gated_delta_rule(*arrays, return_state=True, **options)
    return (y, MatrixState(matrix)) if return_state else y


ConfigT = TypeVar("ConfigT", bound=MatrixStateConfig)


class MatrixStateAttention(Attention[ConfigT, MatrixStates]):
    """Attention with a matrix per head as its state.

        q | k | v = silu(convolution(x Wq | x Wk | x Wv))
        y = (norm(gated_delta_rule(q, k, v, **gates(x))) * silu(x Wg)) Wo

    where norm is an RMS norm of each head with epsilon 1e-6 by default (1e-5 in
    flash-linear-attention, whose layers these follow). Products have no biases unless stated;
    mechanisms published without convolutions have no SiLU of q, k and v. Subclasses set the
    attributes below, implement `gates`, and override other methods if they differ.

    Attributes:
      _op: function of queries, keys, values, the gates, `initial_state`, `return_state` and
        `segment_ids`.
      _summary: computes the state of the tokens alone, with the transition that `merge` needs.
      state_type: class of the mechanism's state.
      norms_heads_jointly: whether the norm is over all heads together.
      gate_activation: activation of the published output gate; no gate when None.
      softmax_projections: projections with the same meaning as in softmax attention, which a
        conversion keeps.
    """

    _op: ClassVar[Callable[..., Any]] = staticmethod(delta_rule)
    _summary: ClassVar[Callable[..., MatrixState | MLSTMState]] = staticmethod(matrix_summary)
    state_type: ClassVar[type[MatrixState] | type[MLSTMState]] = MatrixState
    norms_heads_jointly: ClassVar[bool] = False
    gate_activation: ClassVar[Literal["silu", "sigmoid"] | None] = "silu"
    softmax_projections: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        model_dim, config = self.model_dim, self.config
        num_heads = self.num_heads = getattr(config, "num_value_heads", None) or self.num_heads
        self.key_depth, self.value_depth = config.depths(model_dim, num_heads)
        self.num_key_heads = getattr(config, "num_key_heads", None) or num_heads
        if num_heads % self.num_key_heads:
            raise ValueError(
                f"num_key_heads={self.num_key_heads} does not divide {num_heads} heads of values"
            )
        self.num_steps = steps = getattr(config, "num_steps", 1)
        keys, values = self.num_key_heads * self.key_depth, num_heads * self.value_depth
        axes = "embed", "heads"
        key_axes = axes if self.num_key_heads > 1 else ("embed", None)
        dense = partial(linear, use_bias=False, lora_rank=config.lora_rank, **options)
        self.query, self.key = (dense(model_dim, n * keys, key_axes) for n in (1, steps))
        self.value = dense(model_dim, steps * values, axes)
        size = config.convolution_size if isinstance(config, ConvolvedConfig) else 0
        key_axis = "heads" if self.num_key_heads > 1 else None
        use_bias = getattr(config, "convolution_bias", False)
        self.convolutions = nnx.List(
            CausalConvolution(size, width, axis, use_bias=use_bias, **options)
            for width, axis in (
                *((keys, key_axis), (steps * keys, key_axis)),
                (steps * values, "heads"),
            )
            if size
        )
        self.gate = self.make_gate(values, **options)
        self.norm: Any = self.make_norm(**options)
        self.output = dense(values, model_dim, ("heads", "embed"))

    def make_gate(
        self, values: int, **options: Unpack[LayerOptions]
    ) -> nnx.Linear | LowRank | None:
        """The projection of the output gate, if any."""
        config = self.config
        if self.gate_activation is None and config.output_gate is None:
            if config.gate_activation is not None:
                raise ValueError(
                    f"gate_activation={config.gate_activation!r} without a gate; set output_gate"
                )
            return None
        width = self.num_heads if config.output_gate == "head" else values
        sizes, rank = (self.model_dim, width), config.lora_rank
        return linear(*sizes, ("embed", "heads"), use_bias=False, lora_rank=rank, **options)

    def make_norm(self, **options: Unpack[LayerOptions]) -> nnx.Module | None:
        """The norm of the outputs, if any."""
        heads = self.num_heads if self.norms_heads_jointly else 1
        epsilon = self.config.norm_epsilon
        return RMSNorm(heads * self.value_depth, epsilon=epsilon, **options)

    def gates(self, x: Features) -> Gates:
        """The gates of the tokens, in at least float32."""
        raise NotImplementedError

    def project(self, name: str, x: Features) -> Array:
        """A projection of the tokens, by its name in this layer."""
        return getattr(self, name)(x)

    def heads(self, x: Features, call: CallArguments[MatrixStates]) -> HeadsAndStates:
        """Queries and keys `[..., T, G, K]`, with G = num_key_heads, values `[..., T, N, V]`, and
        the new states of the convolutions; in several steps a token, all steps of keys and
        values."""
        arrays, after = [self.project(name, x) for name in ("query", "key", "value")], []
        for index, convolve in enumerate(self.convolutions):
            before = None if call.state is None else call.state.convolutions[index]
            arrays[index], last = convolve(
                arrays[index], state=before, segment_ids=call.segment_ids
            )
            after.append(last)
        if isinstance(self.config, ConvolvedConfig):
            arrays = [jax.nn.silu(x) for x in arrays]
        query = arrays[0].reshape(*x.shape[:-1], self.num_key_heads, self.key_depth)
        key = self.in_steps(arrays[1], self.num_key_heads, self.key_depth)
        value = self.in_steps(arrays[2], self.num_heads, self.value_depth)
        return query, key, value, tuple(after)

    def in_steps(self, x: Array, heads: int, depth: int) -> OfHeads:
        """`[..., T, heads M depth]` -> `[..., T M, heads, depth]` for M steps of a token, so that a
        part of the features has whole heads."""
        *batch, length, _ = x.shape
        by_head = x.reshape(*batch, length, heads, self.num_steps, depth)
        by_step = jnp.swapaxes(by_head, -3, -2)
        return by_step.reshape(*batch, self.num_steps * length, heads, depth)

    def apply(
        self, x: Features, call: CallArguments[MatrixStates]
    ) -> tuple[Features, MatrixStates | None]:
        query, key, value, convolutions = self.heads(x, call)
        y, matrix = self.recur(query, key, value, self.gates(x), call)
        y = self.finish(x, y.astype(x.dtype), value)
        return y, self._state_after(x, matrix, convolutions, call)

    def recur(
        self,
        query: OfHeads,
        key: OfHeads,
        value: OfHeads,
        gates: Gates,
        call: CallArguments[MatrixStates],
    ) -> tuple[OfHeads, MatrixState | MLSTMState | None]:
        """The mechanism's output `[..., T, N, V]`, and its new state, if the call has one."""
        named = cast("dict[str, Array]", gates)
        steps = {} if self.num_steps == 1 else {"num_steps": self.num_steps}

        def with_gates(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arrays: Array, is_causal: bool = True, **options: Any) -> Any:
                del is_causal
                gates = dict(zip(named, arrays[3:], strict=True))
                return function(*arrays[:3], **gates, **options, **steps)

            return call

        with jax.named_scope("mechanism"):
            return devices.recur(
                call.with_state(None if call.state is None else call.state.matrix),
                with_gates(self._op),
                *(query, key, value, *named.values()),
                empty=self.init_state(query.shape[:-3]).matrix,
                summary=with_gates(self._summary),
            )

    @staticmethod
    def _state_after(
        x: Features,
        matrix: MatrixState | MLSTMState | None,
        convolutions: tuple[Array, ...],
        call: CallArguments[MatrixStates],
    ) -> MatrixStates | None:
        """The state after x, if the call has one."""
        if matrix is None or call.state is None:
            return None
        count = call.state.num_tokens
        return MatrixStates(matrix, convolutions, None if count is None else count + x.shape[-2])

    def finish(self, x: Features, y: OfHeads, value: OfHeads) -> Features:
        """The layer's output, given the mechanism's: `[..., T, N, V]` -> `[..., T, D]`"""
        del value
        flat = *x.shape[:-1], self.num_heads * self.value_depth
        y = self.norm(y.reshape(flat) if self.norms_heads_jointly else y).reshape(flat)
        if self.gate is not None:
            y = y * self.activated_gate(x).astype(y.dtype)
        return self.output(y)

    def activated_gate(self, x: Features) -> Array:
        """The output gate `[..., T, N V]`"""
        activation = self.config.gate_activation or self.gate_activation or "silu"
        activate = jax.nn.silu if activation == "silu" else jax.nn.sigmoid
        gate = activate(self.project("gate", x))
        is_by_head = self.config.output_gate == "head"
        return jnp.repeat(gate, self.value_depth, -1) if is_by_head else gate

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> MatrixStates:
        sizes = self.num_heads, self.key_depth, self.value_depth
        matrix = self.state_type.empty(batch_shape, *sizes, self.sums_dtype)
        return MatrixStates(matrix, tuple(x.init_state(batch_shape) for x in self.convolutions))


class SoftplusDecay(nnx.Module):
    """Steps d = softplus(x + b), and log decays -exp(a) d, in at least float32.

    At initialization exp(a) is uniform in [1, 16], and softplus(b) log-uniform in [0.001, 0.1].

    Args:
      rates: shape of a; the last axes of x.
      biases: shape of b; the last axes of x.
      lower_bound: l, if log decays are l sigmoid(exp(a) (x + b)) instead.
    """

    def __init__(
        self,
        rates: tuple[int, ...],
        biases: tuple[int, ...],
        *,
        lower_bound: float | None = None,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.lower_bound = lower_bound
        self.log_rate = parameter(log_of_uniform(1, 16), *rates, kind="vector", **options)
        bias = inverse_softplus_of_log_uniform(1e-3, 0.1)
        self.bias = parameter(bias, *biases, kind="vector", **options)

    def __call__(self, x: Array) -> tuple[Array, Array]:
        x = in_float32(x)
        bias, log_rate = (
            jnp.broadcast_to(in_float32(p[...]), x.shape) for p in (self.bias, self.log_rate)
        )
        step = jax.nn.softplus(x + bias)
        if self.lower_bound is not None:
            return step, self.lower_bound * jax.nn.sigmoid(jnp.exp(log_rate) * (x + bias))
        return step, -jnp.exp(log_rate) * step


def l2_normalized(x: OfHeads) -> OfHeads:
    """x / |x| over the last axis, computed in at least float32."""
    wide = in_float32(x)
    norm = jax.lax.rsqrt(jnp.sum(wide * wide, -1, keepdims=True) + 1e-6)
    return (wide * norm).astype(x.dtype)
