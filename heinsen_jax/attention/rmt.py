"""Attention within segments, with memory from each to the next, as a layer."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import Attention, AttentionConfig, Capabilities
from heinsen_jax.attention.softmax import SoftmaxAttention
from heinsen_jax.ops.rmt import SegmentState, segment_recurrence
from heinsen_jax.typing import Array

LAYER_NORM_EPSILON = 1e-5


@pydantic.dataclasses.dataclass(
    config=pydantic.ConfigDict(extra="forbid"), frozen=True, kw_only=True
)
class RecurrentMemoryConfig(AttentionConfig):
    """Of the recurrent memory."""

    segment_length: pydantic.PositiveInt = 64
    """Tokens that attend to one another."""
    num_memories: pydantic.PositiveInt = 8
    """Vectors handed from each segment to the next."""


class RecurrentMemoryAttention(Attention):
    """A recurrent memory in every layer: softmax attention over [memory | segment | memory].

        [_, x + y, m'] = s + attention(norm(s)),    s = [m | x | m]

    The published model runs all its layers over a segment before the next one; as a layer among
    others, this one has a memory of its own. The state holds it and the segment begun.

    References:
      Bulatov, Kuratov, Burtsev, 2022, Recurrent Memory Transformer, arXiv:2207.06881.
    """

    Config = RecurrentMemoryConfig
    capabilities = Capabilities(causal=True, streaming=True)

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        config: RecurrentMemoryConfig | None = None,
        *,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        options = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        super().__init__(model_dim, num_heads, config, **options)
        self.attention = SoftmaxAttention(model_dim, num_heads, **options)
        self.norm = nnx.LayerNorm(
            model_dim, epsilon=LAYER_NORM_EPSILON, param_dtype=self.param_dtype, rngs=rngs
        )
        init = nnx.initializers.normal(1.0)
        shape = self.config.num_memories, model_dim
        self.memory = nnx.Param(init(rngs.params(), shape, self.param_dtype))

    def mix(
        self,
        x: Array,
        *,
        source: Array | None,
        is_causal: bool,
        segment_ids: Array | None,
        state: Any,
    ) -> tuple[Array, Any]:
        del source, is_causal, segment_ids  # not declared
        result = segment_recurrence(
            lambda s: s + self.attention(self.norm(s)).astype(s.dtype),
            x,
            self.memory[...] if state is None else None,
            segment_length=self.config.segment_length,
            initial_state=state,
            return_state=state is not None,
        )
        y, state = (result, None) if state is None else result
        return (y - x).astype(x.dtype), state

    def init_state(
        self, batch_shape: Sequence[int], *, capacity: int | None = None
    ) -> SegmentState:
        del capacity  # the same for any number of tokens
        memory = jnp.broadcast_to(self.memory[...], (*batch_shape, *self.memory.shape))
        return SegmentState.start(memory, self.config.segment_length)
