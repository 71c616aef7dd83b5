"""A state-space model with a dense transition, over generalized orders of magnitude, as a layer."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
import pydantic

from heinsen_jax.attention.base import Attention, AttentionConfig, CallArguments, Capabilities
from heinsen_jax.attention.parameters import LayerOptions, linear, orthogonal, parameter, uniform
from heinsen_jax.goom.recurrence import DenseState, dense_recurrence
from heinsen_jax.goom.wide import Wide
from heinsen_jax.typing import Features, config_dataclass


@config_dataclass
class GoomSSMConfig(AttentionConfig):
    """Configuration of the state-space model."""

    state_depth: pydantic.PositiveInt | None = None
    """Size of a state vector; model_dim / num_heads, rounded, when None."""
    gain: Annotated[float, pydantic.Field(gt=0)] = 0.99
    """Magnitude of all eigenvalues of the initial transition."""
    lora_rank: pydantic.PositiveInt | None = None
    """Rank of products A B that are added to the matrices of the projections, as in LoRA; B is
    initially 0. None are added when None."""

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(causal=True, streaming=True, segments=True)

    def depth(self, model_dim: int, num_heads: int) -> int:
        """`state_depth`, with the default resolved."""
        return self.state_depth or max(round(model_dim / num_heads), 1)

    def flops(self, model_dim: int, num_heads: int, length: int, is_causal: bool = True) -> float:
        return 2.0 * num_heads * self.depth(model_dim, num_heads) ** 2


class GoomSSM(Attention[GoomSSMConfig, DenseState]):
    """A linear recurrence whose transition is any matrix, not only a diagonal one.

        x_t = x_{t-1} A + u_t B
        y_t = (a * sigmoid(b)) W,    a | b = normed(x_t) C + u_t D

    for the tokens u, with one A `[state_depth, state_depth]` for the state vectors x of all heads.
    States are floats with int32 exponents, for magnitudes from exp(-3.7e8) to exp(3.7e8); vectors
    beyond are NaN in y. The readout has normed(x) = x exp(2) / max |x| by head; the maximum has no
    gradient. A is initially `gain` times an orthogonal matrix; the states before the first token
    are trained, and initially uniform in +-0.1. A segment begins with them, too.

    References:
      Heinsen and Kozachkov, 2025, Generalized Orders of Magnitude for Scalable, Parallel,
      High-Dynamic-Range Computation, arXiv:2510.03426.
    """

    Config = GoomSSMConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        depth = self.config.depth(self.model_dim, self.num_heads)
        width = self.num_heads * depth
        init = orthogonal(self.config.gain)
        self.transition = parameter(init, depth, depth, kind="matrix", **options)
        start = self.num_heads, depth
        self.initial = parameter(uniform(0.1), *start, kind="vector", **options)
        dense = partial(linear, use_bias=False, lora_rank=self.config.lora_rank, **options)
        self.input = dense(self.model_dim, width, ("embed", "heads"))
        self.readout = dense(width, 2 * self.model_dim, ("heads", "embed"))
        self.skip = dense(self.model_dim, 2 * self.model_dim, ("embed",))
        self.output = dense(self.model_dim, self.model_dim, ("mlp", "embed"))

    def apply(
        self, x: Features, call: CallArguments[DenseState]
    ) -> tuple[Features, DenseState | None]:
        self.check_segments(call)
        inputs = self.input(x).reshape(*x.shape[:-1], *self.initial.shape)
        parameters = self.transition[...], self.initial[...]
        with jax.named_scope("mechanism"):
            read, after = call.recur(
                dense_recurrence, inputs, *parameters, segment_ids=call.segment_ids
            )
        read = read.reshape(*x.shape[:-1], self.initial.size)
        return self.output(jax.nn.glu(self.readout(read) + self.skip(x))), after

    def init_state(self, batch_shape: Sequence[int], *, capacity: int | None = None) -> DenseState:
        initial = self.initial[...].astype(self.sums_dtype)
        state = Wide.of(jnp.broadcast_to(initial, (*batch_shape, *initial.shape)))
        return DenseState(state.mantissa, state.exponent)
