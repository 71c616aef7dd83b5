"""Registry of attention mechanisms."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar, Unpack

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.additive import AdditiveAttention
from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, Capabilities
from heinsen_jax.attention.block_sparse import BlockSparseAttention
from heinsen_jax.attention.colt5 import ConditionalAttention
from heinsen_jax.attention.deltanet import DeltaNetAttention
from heinsen_jax.attention.dilated import DilatedAttention
from heinsen_jax.attention.fox import ForgettingAttention
from heinsen_jax.attention.gated_deltanet import GatedDeltaNetAttention
from heinsen_jax.attention.gated_deltanet2 import GatedDeltaNet2Attention
from heinsen_jax.attention.gated_deltaproduct import GatedDeltaProductAttention
from heinsen_jax.attention.gla import GatedLinearAttention
from heinsen_jax.attention.goom_ssm import GoomSSM
from heinsen_jax.attention.gqa import GroupedQueryAttention
from heinsen_jax.attention.hgrn2 import HGRN2Attention
from heinsen_jax.attention.kda import KimiDeltaAttention
from heinsen_jax.attention.l1 import L1Attention
from heinsen_jax.attention.l1_sparse import L1SparseAttention
from heinsen_jax.attention.linear import LinearAttention
from heinsen_jax.attention.linformer import LinformerAttention
from heinsen_jax.attention.log import LogAttention
from heinsen_jax.attention.log_window import LogWindowAttention
from heinsen_jax.attention.longformer import LongformerAttention
from heinsen_jax.attention.mamba2 import Mamba2Attention
from heinsen_jax.attention.memory_compressed import MemoryCompressedAttention
from heinsen_jax.attention.mla import LatentAttention
from heinsen_jax.attention.mlstm import MLSTMAttention
from heinsen_jax.attention.parameters import LayerOptions
from heinsen_jax.attention.performer import PerformerAttention
from heinsen_jax.attention.retnet import RetentionAttention
from heinsen_jax.attention.rmt import RecurrentMemoryAttention
from heinsen_jax.attention.rwkv7 import RWKV7Attention
from heinsen_jax.attention.short_convolution import ShortConvolution
from heinsen_jax.attention.sliding_window import SlidingWindowAttention
from heinsen_jax.attention.softmax import SoftmaxAttention
from heinsen_jax.attention.taylor import TaylorAttention
from heinsen_jax.attention.tglobal import TransientGlobalAttention
from heinsen_jax.errors import UserError, explain
from heinsen_jax.ops.log_attention import Chunked
from heinsen_jax.typing import Array, DTypeLike, Features, PyTree, config_dataclass

FieldValue: TypeAlias = bool | int | float | str | Chunked | None
"""The value of a field of a mechanism's configuration."""

_MECHANISMS: dict[str, type[Attention]] = {
    "log": LogAttention,
    "softmax": SoftmaxAttention,
    "gqa": GroupedQueryAttention,
    "mla": LatentAttention,
    "sliding_window": SlidingWindowAttention,
    "dilated": DilatedAttention,
    "longformer": LongformerAttention,
    "tglobal": TransientGlobalAttention,
    "block_sparse": BlockSparseAttention,
    "memory_compressed": MemoryCompressedAttention,
    "linformer": LinformerAttention,
    "linear": LinearAttention,
    "performer": PerformerAttention,
    "colt5": ConditionalAttention,
    "rmt": RecurrentMemoryAttention,
    "l1": L1Attention,
    "l1_sparse": L1SparseAttention,
    "additive": AdditiveAttention,
    "retnet": RetentionAttention,
    "gla": GatedLinearAttention,
    "hgrn2": HGRN2Attention,
    "mamba2": Mamba2Attention,
    "deltanet": DeltaNetAttention,
    "gated_deltanet": GatedDeltaNetAttention,
    "kda": KimiDeltaAttention,
    "mlstm": MLSTMAttention,
    "taylor": TaylorAttention,
    "fox": ForgettingAttention,
    "log_window": LogWindowAttention,
    "short_convolution": ShortConvolution,
    "gated_deltaproduct": GatedDeltaProductAttention,
    "gated_deltanet2": GatedDeltaNet2Attention,
    "rwkv7": RWKV7Attention,
    "goom_ssm": GoomSSM,
}


def names() -> tuple[str, ...]:
    """Names of all mechanisms.

    Examples:
      >>> names()[:3]
      ('log', 'softmax', 'gqa')
    """
    return tuple(_MECHANISMS)


def mechanism(name: str) -> type[Attention]:
    """The class of a mechanism; `ParallelAttention` for several in parallel, such as gqa+mamba2.

    Raises:
      UserError: unknown mechanism.

    Examples:
      >>> mechanism("log").capabilities.streaming
      True
    """
    for part in name.split("+"):
        if part not in _MECHANISMS:
            raise UserError(
                f"attention mechanism {part!r}: unknown; choose one of {', '.join(names())}"
            )
    return ParallelAttention if "+" in name else _MECHANISMS[name]


def configure(name: str, **config: FieldValue) -> AttentionConfig:
    """A mechanism's configuration. In a parallel layer, names of fields begin with the mechanism's
    name and a dot.

    Raises:
      UserError: unknown mechanism or field, or a value is out of its range; the message names it.

    Examples:
      >>> configure("sliding_window", window_size=16).window_size
      16
      >>> configure("gqa+mamba2", **{"mamba2.key_depth": 64}).parts["mamba2"].key_depth
      64
    """
    kind = mechanism(name).Config
    if "+" in name:
        options = options_of_parts(name, config)
        return ParallelConfig(parts={part: configure(part, **options[part]) for part in options})
    try:
        return kind(**config)
    except pydantic.ValidationError as error:
        known = ", ".join(field.name for field in dataclasses.fields(kind))
        raise UserError(f"{explain(error, name)}; the options of {name} are {known}") from None


def options_of_parts(
    name: str, options: Mapping[str, FieldValue]
) -> dict[str, dict[str, FieldValue]]:
    """The options of each mechanism of several in parallel, whose keys begin with its name.

    Raises:
      UserError: a mechanism is repeated, or a key has another form.

    Examples:
      >>> options_of_parts("gqa+mamba2", {"gqa.scale": 0.5})
      {'gqa': {'scale': 0.5}, 'mamba2': {}}
    """
    parts: dict[str, dict[str, FieldValue]] = {part: {} for part in name.split("+")}
    if len(parts) <= name.count("+"):
        raise UserError(f"{name}: has a mechanism twice; name each once")
    for key, value in options.items():
        part, _, option = key.partition(".")
        if part not in parts or not option:
            raise UserError(
                f"{name}: option {key!r} must begin with the name of a mechanism; write "
                f"{next(iter(parts))}.{option or part}"
            )
        parts[part][option] = value
    return parts


@config_dataclass
class ParallelConfig(AttentionConfig):
    """Configuration of mechanisms in parallel."""

    parts: Mapping[str, AttentionConfig]
    """The configurations of the mechanisms, by name."""

    def __hash__(self) -> int:
        return hash(frozenset(self.parts.items()))

    @property
    def capabilities(self) -> Capabilities:
        parts = [part.capabilities for part in self.parts.values()]
        names = [field.name for field in dataclasses.fields(Capabilities)]
        return Capabilities(**{name: all(getattr(x, name) for x in parts) for name in names})

    def flops(
        self, model_dim: int, num_heads: int, length: int, is_causal: bool = True
    ) -> float | None:
        sizes = model_dim, num_heads, length, is_causal
        products = [part.flops(*sizes) for part in self.parts.values()]
        counted = [x for x in products if x is not None]
        return sum(counted) if len(counted) == len(products) else None


class ParallelAttention(Attention[ParallelConfig, dict[str, PyTree[Array]]]):
    """Mechanisms in parallel: the sum of their outputs, with a state for each.

    References:
      Zuo et al., 2025, Falcon-H1, arXiv:2507.22448.
    """

    Config = ParallelConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        for name, config in self.config.parts.items():
            setattr(self, name, mechanism(name)(self.model_dim, self.num_heads, config, **options))

    @property
    def parts(self) -> dict[str, Attention]:
        """The layers, by the names of their mechanisms."""
        return {name: getattr(self, name) for name in self.config.parts}

    def apply(
        self, x: Features, call: CallArguments[dict[str, PyTree[Array]]]
    ) -> tuple[Features, dict[str, PyTree[Array]] | None]:
        outputs, states = [], {}
        for name, part in self.parts.items():
            before = None if call.state is None else call.state[name]
            y, states[name] = part.apply(x, call.with_state(before))
            outputs.append(y)
        return sum(outputs[1:], outputs[0]), None if call.state is None else states

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> dict[str, PyTree[Array]]:
        return {
            name: part.init_state(batch_shape, capacity=capacity)
            for name, part in self.parts.items()
        }

    def state_size(self, context_length: int) -> int:
        return sum(part.state_size(context_length) for part in self.parts.values())


T = TypeVar("T", Attention, AttentionConfig)


def parts_of(name: str, layer: T) -> Mapping[str, T]:
    """The mechanisms in parallel of a layer or its configuration, by name; itself if it is one."""
    return getattr(layer, "parts", {name: layer})


def build(
    name: str,
    *,
    model_dim: int,
    num_heads: int,
    rngs: nnx.Rngs,
    dtype: DTypeLike | None = None,
    param_dtype: DTypeLike = jnp.float32,
    **config: FieldValue,
) -> Attention:
    """Build a layer by the name of its mechanism: x `[*B, T, model_dim]` to the same shape.

    Args:
      name: one of `names()`.
      model_dim: width of the residual stream.
      num_heads: number of heads.
      rngs: keys of the initial parameters.
      dtype: dtype of the computation; by default the type that inputs and parameters promote to.
      param_dtype: dtype of the parameters.
      config: options of the mechanism, the fields of its `Config`.

    Raises:
      ValueError: as `configure`, or the sizes are inconsistent.

    Examples:
      >>> layer = build("linear", model_dim=16, num_heads=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 5, 16))).shape
      (1, 5, 16)
    """
    return mechanism(name)(
        model_dim,
        num_heads,
        configure(name, **config),
        dtype=dtype,
        param_dtype=param_dtype,
        rngs=rngs,
    )
