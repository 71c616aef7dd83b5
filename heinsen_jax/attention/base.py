"""What every attention mechanism promises."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
from flax import nnx

from heinsen_jax.typing import Array


@dataclass(frozen=True)
class Capabilities:
    """What a mechanism can do; what it does not declare it refuses."""

    causal: bool = False
    bidirectional: bool = False
    streaming: bool = False
    cross: bool = False
    segments: bool = False


class Attention(nnx.Module):
    """A layer that mixes tokens: `[..., T, D] -> [..., T, D]`, with explicit state.

    Subclasses set `capabilities` and, where they stream, implement `init_state`.
    """

    capabilities: ClassVar[Capabilities]

    def __call__(self, x: Array, *, state: Any = None, return_state: bool = False) -> Any:
        """Mixes tokens x `[..., T, D]`; with `return_state`, returns a pair (y, state after T)."""
        raise NotImplementedError

    def init_state(self, batch_shape: Sequence[int]) -> Any:
        """The state before the first token."""
        raise NotImplementedError(f"{type(self).__name__} does not stream: it has no state")

    def state_size(self, context_length: int) -> int:
        """Bytes of state that one sequence needs after context_length tokens."""
        del context_length
        state = jax.eval_shape(lambda: self.init_state(()))
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
