"""Attention within segments, with memory from each to the next, as a layer."""

from collections.abc import Sequence
from functools import partial
from typing import Unpack

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, Capabilities
from heinsen_jax.attention.parameters import LayerNorm, LayerOptions, parameter
from heinsen_jax.attention.softmax import SoftmaxAttention
from heinsen_jax.ops.rmt import SegmentState, segment_recurrence
from heinsen_jax.typing import Features, config_dataclass


@config_dataclass
class RecurrentMemoryConfig(AttentionConfig):
    """Configuration of recurrent-memory attention."""

    segment_length: pydantic.PositiveInt = 64
    """Number of tokens of a segment, which attend to each other."""
    num_memories: pydantic.PositiveInt = 8
    """Number of memory vectors, carried from segment to segment."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, streaming=True)


class RecurrentMemoryAttention(Attention[RecurrentMemoryConfig, SegmentState]):
    """A recurrent memory in every layer: softmax attention over [memory | segment | memory].

        [_, x + y, m'] = s + attention(norm(s)),    s = [m | x | m]

    The published model runs all its layers over a segment before the next one; here each layer has
    its own memory. The state has the memory and the incomplete segment.

    References:
      Bulatov, Kuratov, Burtsev, 2022, Recurrent Memory Transformer, arXiv:2207.06881.
    """

    Config = RecurrentMemoryConfig

    @classmethod
    def short_options(cls, length: int) -> dict[str, int]:
        return {"segment_length": length // 4, "num_memories": 4}

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        self.attention = SoftmaxAttention(self.model_dim, self.num_heads, **options)
        self.norm = LayerNorm(self.model_dim, **options)
        shape = self.config.num_memories, self.model_dim
        self.memory = parameter(nnx.initializers.normal(1.0), *shape, kind="vector", **options)

    def apply(
        self, x: Features, call: CallArguments[SegmentState]
    ) -> tuple[Features, SegmentState | None]:
        op = partial(
            segment_recurrence,
            lambda s: s + self.attention(self.norm(s)).astype(s.dtype),
            segment_length=self.config.segment_length,
        )
        y, state = call.recur(op, x, self.memory[...] if call.state is None else None)
        return y - x.astype(y.dtype), state

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> SegmentState:
        memory = jnp.broadcast_to(self.memory[...], (*batch_shape, *self.memory.shape))
        return SegmentState.start(memory, self.config.segment_length)
