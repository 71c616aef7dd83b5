"""Registry of attention mechanisms."""

import dataclasses
from typing import TypeAlias

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.additive import AdditiveAttention
from heinsen_jax.attention.base import Attention, AttentionConfig
from heinsen_jax.attention.block_sparse import BlockSparseAttention
from heinsen_jax.attention.colt5 import ConditionalAttention
from heinsen_jax.attention.deltanet import DeltaNetAttention
from heinsen_jax.attention.dilated import DilatedAttention
from heinsen_jax.attention.fox import ForgettingAttention
from heinsen_jax.attention.gated_deltanet import GatedDeltaNetAttention
from heinsen_jax.attention.gated_deltanet2 import GatedDeltaNet2Attention
from heinsen_jax.attention.gated_deltaproduct import GatedDeltaProductAttention
from heinsen_jax.attention.gla import GatedLinearAttention
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
from heinsen_jax.typing import DTypeLike

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
}


def names() -> tuple[str, ...]:
    """Names of all mechanisms.

    Examples:
      >>> names()[:3]
      ('log', 'softmax', 'gqa')
    """
    return tuple(_MECHANISMS)


def mechanism(name: str) -> type[Attention]:
    """The class of a mechanism.

    Raises:
      ValueError: unknown mechanism.

    Examples:
      >>> mechanism("log").capabilities.streaming
      True
    """
    if name not in _MECHANISMS:
        raise ValueError(
            f"attention mechanism {name!r}: unknown; choose one of {', '.join(names())}"
        )
    return _MECHANISMS[name]


def configure(name: str, **config: FieldValue) -> AttentionConfig:
    """A mechanism's configuration.

    Raises:
      UserError: unknown mechanism or field, or a value is out of its range; the message names it.

    Examples:
      >>> configure("sliding_window", window_size=16).window_size
      16
    """
    kind = mechanism(name).Config
    try:
        return kind(**config)
    except pydantic.ValidationError as error:
        known = ", ".join(field.name for field in dataclasses.fields(kind))
        raise UserError(f"{explain(error, name)}; the options of {name} are {known}") from None


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
    """A mechanism by name, with fields of its configuration as further keywords.

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
