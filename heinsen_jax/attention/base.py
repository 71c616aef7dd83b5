"""The interface of attention mechanisms."""

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar, Generic, Literal, TypedDict, TypeVar, Unpack, cast, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.attention.cache import TokenCache
from heinsen_jax.attention.explicit_mesh import with_auto_axes
from heinsen_jax.attention.parameters import LayerOptions
from heinsen_jax.ops.arguments import check_array
from heinsen_jax.sharding import current_mesh, rules_or_default, splits_tokens, use_rules
from heinsen_jax.typing import (
    Array,
    DTypeLike,
    Features,
    Float,
    Integer,
    PyTree,
    common_dtype,
    config_dataclass,
    wide,
)

StateT = TypeVar("StateT")
OtherT = TypeVar("OtherT")
ConfigT = TypeVar("ConfigT", bound="AttentionConfig")


@dataclass(frozen=True)
class Capabilities:
    """Capabilities of a mechanism; an undeclared capability is refused.

    Attributes:
      causal: tokens attend only to themselves and to earlier tokens.
      bidirectional: tokens attend to all tokens.
      streaming: explicit state; a sequence may be fed in chunks of any lengths.
      cross: tokens attend to another sequence.
      segments: packed documents do not attend to each other.
      mergeable: states of consecutive chunks merge; a sequence may be split over devices.
    """

    causal: bool = False
    bidirectional: bool = False
    streaming: bool = False
    cross: bool = False
    segments: bool = False
    mergeable: bool = False

    @classmethod
    def all(cls) -> "Capabilities":
        return cls(**{field.name: True for field in fields(cls)})


@config_dataclass
class AttentionConfig:
    """Configuration of a mechanism; subclasses add fields, all with defaults, and declare their
    capabilities."""

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities of the mechanism as configured."""
        return Capabilities()

    def flops(
        self, model_dim: int, num_heads: int, length: int, is_causal: bool = True
    ) -> float | None:
        """FLOPs of the mechanism's own matrix products, per token of a forward pass over `length`
        tokens, in the recurrent form if it has one; None if they are not counted. Products with
        parameters are not included."""
        del model_dim, num_heads, length, is_causal
        return None


class OpKeywords(TypedDict, total=False):
    """Keywords that all ops over complete sequences have."""

    is_causal: bool
    segment_ids: Integer[Array, "*B T"] | None


@dataclass(frozen=True)
class CallArguments(Generic[StateT]):
    """Arguments of `Attention.__call__`, checked against the capabilities of the mechanism. The
    state is None unless the call streams."""

    source: Float[Array, "*B S D"] | None = None
    is_causal: bool = True
    segment_ids: Integer[Array, "*B T"] | None = None
    state: StateT | None = None

    @property
    def keywords(self) -> OpKeywords:
        """Keywords for an op over a complete sequence."""
        return {"is_causal": self.is_causal, "segment_ids": self.segment_ids}

    def with_state(self, state: OtherT | None) -> "CallArguments[OtherT]":
        """A copy with another state."""
        return CallArguments(self.source, self.is_causal, self.segment_ids, state)

    def recur(
        self,
        op: Callable[..., Array | tuple[Array, StateT]],
        *arguments: PyTree,
        **keywords: Unpack[OpKeywords],
    ) -> tuple[Array, StateT | None]:
        """Call an op that takes `initial_state`; return its result and the new state, if any."""
        if self.state is None:
            return cast(Array, op(*arguments, **keywords)), None
        result = op(*arguments, initial_state=self.state, return_state=True, **keywords)
        return cast("tuple[Array, StateT]", result)


class _Declared:
    """Capabilities of a layer as configured. Its class has the default configuration's, or none if
    the configuration has required fields."""

    def __get__(self, layer: "Attention | None", kind: "type[Attention]") -> Capabilities:
        if layer is not None:
            return layer.config.capabilities
        if any(x.default is MISSING and x.default_factory is MISSING for x in fields(kind.Config)):
            raise AttributeError(f"{kind.__name__}: its capabilities depend on its configuration")
        return kind.Config().capabilities


class Attention(nnx.Module, Generic[ConfigT, StateT]):
    """A layer that mixes tokens: `[..., T, D] -> [..., T, D]`, with explicit state.

    Generic in the mechanism's configuration and state; the state is `Never` without streaming.

    Subclasses have a `Config`, which declares `capabilities`; they implement `setup`, `apply`, and,
    if they stream, `init_state`.

    Args:
      model_dim: width D of the input and output.
      num_heads: number of heads.
      config: configuration of the mechanism; its defaults when None.
      dtype: dtype of activations and matrix products; sums over tokens are at least float32.
      param_dtype: dtype of the parameters; of vectors such as scales of norms, at least float32.
      rngs: the source of the initial weights.
    """

    capabilities = _Declared()
    Config: ClassVar[type[AttentionConfig]] = AttentionConfig

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        config: ConfigT | None = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.model_dim = model_dim
        self.num_heads = num_heads
        self.config = cast(ConfigT, self.Config() if config is None else config)
        self.dtype = dtype
        self.param_dtype = jnp.dtype(param_dtype)
        self.setup(dtype=dtype, param_dtype=self.param_dtype, rngs=rngs)

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        """Create the parameters; the options are `LayerOptions`."""

    @overload
    def __call__(
        self,
        x: Features,
        *,
        source: Float[Array, "*B S D"] | None = None,
        is_causal: bool | None = None,
        segment_ids: Integer[Array, "*B T"] | None = None,
        state: StateT | None = None,
        return_state: Literal[False] = False,
    ) -> Features: ...

    @overload
    def __call__(
        self,
        x: Features,
        *,
        source: Float[Array, "*B S D"] | None = None,
        is_causal: bool | None = None,
        segment_ids: Integer[Array, "*B T"] | None = None,
        state: StateT | None = None,
        return_state: Literal[True],
    ) -> tuple[Features, StateT]: ...

    @with_auto_axes(num_features=1)
    def __call__(
        self,
        x: Features,
        *,
        source: Float[Array, "*B S D"] | None = None,
        is_causal: bool | None = None,
        segment_ids: Integer[Array, "*B T"] | None = None,
        state: StateT | None = None,
        return_state: bool = False,
    ) -> Features | tuple[Features, StateT]:
        """Apply the mechanism.

        Args:
          x: `[..., T, D]`.
          source: `[..., S, D]`, tokens to attend to instead of x (cross-attention).
          is_causal: whether tokens attend only to themselves and earlier tokens. When None, True
            if the mechanism is causal and no source is given.
          segment_ids: `[..., T]`; tokens attend only to their own segment. Each segment is one run
            of equal ids, and its id must not recur: some mechanisms compare ids only for equality.
          state: state after the tokens before x; the empty state when None.
          return_state: whether to return the state after x, too.

        Returns:
          y `[..., T, D]`, or the pair (y, state).

        Raises:
          NotImplementedError: the mechanism lacks a capability that the call needs.
          ValueError: x or source is not of width D, segment_ids have not the shape `[..., T]` of x,
            or the state has other batch axes than x.
        """
        for name, tokens in (("x", x), ("source", source)):
            if tokens is not None and tokens.shape[-1] != self.model_dim:
                raise ValueError(
                    f"{name} {[*tokens.shape]} must have width model_dim={self.model_dim}"
                )
        if is_causal is None:
            is_causal = self.capabilities.causal and source is None
        streams = state is not None or return_state
        needed = {
            "causal": is_causal,
            "bidirectional": not is_causal and source is None,
            "cross": source is not None,
            "segments": segment_ids is not None,
            "streaming": streams,
            "mergeable": splits_tokens(x.shape[-2]),
        }
        for name, is_needed in needed.items():
            if is_needed and not getattr(self.capabilities, name):
                able = [x.name for x in fields(Capabilities) if getattr(self.capabilities, x.name)]
                raise NotImplementedError(
                    f"{type(self).__name__}: no capability {name!r}; it has {', '.join(able)}"
                )
        if is_causal and source is not None:
            raise NotImplementedError("is_causal with source: the order of tokens is undefined")
        if streams and not is_causal:
            raise NotImplementedError(
                "state is unsupported with is_causal=False or source; pass all tokens"
            )
        if state is not None:
            self.check_batch(state, x.shape[:-2])
        check_array("segment_ids", segment_ids, (x.shape[:-1],), jnp.integer)
        if streams and state is None:
            state = self.init_state(x.shape[:-2])
        if self.dtype is None:  # mechanisms compute in the dtype of x
            x = x.astype(common_dtype(x, self.param_dtype))
            source = None if source is None else source.astype(x.dtype)
        call = CallArguments(source, is_causal, segment_ids, state)
        if current_mesh() is None:
            y, after = self.apply(x, call)
        else:
            with use_rules(rules_or_default()):
                y, after = self.apply(x, call)
        y = y.astype(x.dtype if self.dtype is None else self.dtype)
        return (y, cast(StateT, after)) if return_state else y

    def apply(self, x: Features, call: CallArguments[StateT]) -> tuple[Features, StateT | None]:
        """Compute y, and the state after x if the call has one."""
        raise NotImplementedError

    def check_segments(self, call: CallArguments[StateT]) -> None:
        """Refuse segments together with a state."""
        if call.segment_ids is not None and call.state is not None:
            raise NotImplementedError(
                f"{type(self).__name__}: segment_ids is unsupported with a state; pass whole "
                "segments without a state"
            )

    def check_batch(self, state: StateT, batch: tuple[int, ...]) -> None:
        """Raise ValueError unless the first axes of all arrays of a state are these batch axes, and
        its first array has no others."""
        one = jax.eval_shape(lambda: self.init_state(()))
        given, own = (
            [np.shape(x) for x in jax.tree.leaves(tree) if np.ndim(x)] for tree in (state, one)
        )
        leading = [len(x) - len(y) for x, y in zip(given[:1], own, strict=False)]
        for shape in given:
            if leading != [len(batch)] or shape[: len(batch)] != batch:
                raise ValueError(
                    f"state: an array has shape {[*shape]}, but x has batch axes {[*batch]}; give "
                    "x as [..., T, D], and a state of init_state(batch_shape), or repeat one "
                    "sequence's"
                )

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> StateT:
        """The state before the first token.

        Args:
          batch_shape: the leading axes.
          capacity: maximum number of tokens in states that store every token. Such a state then
            has a fixed shape, as loops under `jit` require. It grows with each call when None.
        """
        raise NotImplementedError(f"{type(self).__name__} does not stream: it has no state")

    @property
    def cache_dtype(self) -> np.dtype:
        """Dtype of tokens in a state, such as keys and values."""
        return jnp.dtype(self.dtype or self.param_dtype)

    @property
    def sums_dtype(self) -> np.dtype:
        """Dtype of sums over tokens in a state: at least float32."""
        return wide(self.param_dtype)

    def state_size(self, context_length: int) -> int:
        """Bytes of state that one sequence needs after context_length tokens."""
        state = jax.eval_shape(lambda: self.init_state((), capacity=context_length))
        return num_bytes(state.arrays if isinstance(state, TokenCache) else state)

    def flops(self, length: int, is_causal: bool = True) -> float | None:
        """`AttentionConfig.flops` of this layer."""
        return self.config.flops(self.model_dim, self.num_heads, length, is_causal)

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        """Options for sequences of `length` tokens, at least 16, where the default windows, blocks
        and segments would cover whole sequences."""
        del length
        return {}


def num_bytes(arrays: PyTree) -> int:
    """Size in bytes of all arrays of a pytree."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(arrays))
