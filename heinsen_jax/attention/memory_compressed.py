"""Attention over compressed keys and values, as a layer."""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import pydantic
from flax import nnx

from heinsen_jax.attention.base import CallArguments, Capabilities
from heinsen_jax.attention.heads import HeadedAttention, HeadsConfig
from heinsen_jax.attention.parameters import LayerOptions, parameter, uniform
from heinsen_jax.ops.memory_compressed import (
    CompressedCache,
    Compression,
    memory_compressed_attention,
)
from heinsen_jax.typing import DTypeLike, Keys, Mixed, Query, Values, config_dataclass


@config_dataclass
class MemoryCompressedConfig(HeadsConfig):
    """Configuration of memory-compressed attention."""

    factor: pydantic.PositiveInt = 3
    """Number of tokens per compressed key or value."""
    capacity: pydantic.PositiveInt = 4096
    """Default capacity of the state, in tokens."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, bidirectional=True, streaming=True, cross=True)


class MemoryCompressedAttention(HeadedAttention[MemoryCompressedConfig, CompressedCache]):
    """Softmax attention over keys and values that a strided convolution compresses.

    A query attends to a trained null key and, if causal, to the groups that are complete at its
    position; an incomplete last group is masked. The state has the groups.

    References:
      Liu et al., 2018, Generating Wikipedia by Summarizing Long Sequences, arXiv:1801.10198.
    """

    Config = MemoryCompressedConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        groups, factor = self.num_kv_heads, self.config.factor

        def parameters(depth: int) -> nnx.Dict:
            init = uniform((factor * depth) ** -0.5)
            return nnx.Dict(
                kernel=parameter(init, groups, factor, depth, depth, kind="matrix", **options),
                bias=parameter(init, groups, depth, kind="vector", **options),
                null=parameter(init, groups, depth, kind="vector", **options),
            )

        self.of_keys, self.of_values = parameters(self.key_depth), parameters(self.value_depth)

    def _compressions(self, dtype: DTypeLike) -> list[Compression]:
        return [
            Compression(*(part[name][...].astype(dtype) for name in ("kernel", "bias", "null")))
            for part in (self.of_keys, self.of_values)
        ]

    def attend(
        self, query: Query, key: Keys, value: Values, call: CallArguments[CompressedCache]
    ) -> tuple[Mixed, CompressedCache | None]:
        arrays = query, key, value, *self._compressions(query.dtype)
        op = partial(memory_compressed_attention, pad="right")
        return call.recur(op, *arrays, is_causal=call.is_causal)

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> CompressedCache:
        dtype = self.cache_dtype
        num_tokens: int = self.config.capacity if capacity is None else capacity
        return CompressedCache.empty(
            batch_shape, *self._compressions(dtype), capacity=num_tokens, dtype=dtype
        )
