"""HGRN2: linear attention whose keys are the complements of its decays, as a layer."""

import math
from typing import Annotated, Unpack

import jax
import jax.numpy as jnp
import pydantic
from flax import nnx

from heinsen_jax.attention.base import CallArguments
from heinsen_jax.attention.matrix_state import (
    Gates,
    HeadsAndStates,
    MatrixStateAttention,
    MatrixStateConfig,
    MatrixStates,
    OfHeads,
)
from heinsen_jax.attention.parameters import LayerOptions, in_float32, parameter
from heinsen_jax.typing import Features, config_dataclass


@config_dataclass
class HGRN2Config(MatrixStateConfig):
    """Configuration of HGRN2."""

    lower_bound: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.0
    """Initial lower bound of the forget gates, trained for each key feature; none if 0. As
    published it increases from layer to layer, from 0 in the first one: give each layer its own
    entry, as in `--model.attention hgrn2 hgrn2:lower_bound=0.5`."""


class HGRN2Attention(MatrixStateAttention[HGRN2Config]):
    """HGRN2: a gated linear RNN with a matrix as its state.

        S_t = Diag(f_t) S_(t-1) + (1 - f_t) v_t^T,    f = l + (1 - l) sigmoid(x Wf)
        y = norm(S^T silu(x Wq)) Wo

    with a lower bound l = sigmoid(c) by key feature, and an RMS norm over all heads. (Published:
    bounds of all layers together, as the cumulative sum of a softmax over layers.)

    References:
      Qin et al., 2024, HGRN2: Gated Linear RNNs with State Expansion, arXiv:2404.07904.
    """

    Config = HGRN2Config
    gate_activation = None
    norms_heads_jointly = True
    softmax_projections = "query", "value"  # `key` has the logits of the forget gates

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        if bound := self.config.lower_bound:
            logit = nnx.initializers.constant(math.log(bound / (1 - bound)))
            self.bound = parameter(logit, self.num_heads * self.key_depth, kind="vector", **options)

    def heads(self, x: Features, call: CallArguments[MatrixStates]) -> HeadsAndStates:
        query, logits, value, after = super().heads(x, call)
        log_forget = self._log_forget(in_float32(logits))
        return jax.nn.silu(query), (-jnp.expm1(log_forget)).astype(x.dtype), value, after

    def gates(self, x: Features) -> Gates:
        logits = in_float32(self.key(x)).reshape(*x.shape[:-1], self.num_heads, self.key_depth)
        return {"log_decay": self._log_forget(logits)}

    def _log_forget(self, logits: OfHeads) -> OfHeads:
        """log f `[..., T, N, K]`"""
        if not self.config.lower_bound:
            return jax.nn.log_sigmoid(logits)
        bound = in_float32(self.bound[...]).reshape(logits.shape[-2:])
        bound = jnp.broadcast_to(bound, logits.shape)
        # log(l + (1 - l) s) for l = sigmoid(c): logaddexp(c, log s) - softplus(c)
        log_forget = jnp.logaddexp(bound, jax.nn.log_sigmoid(logits)) - jax.nn.softplus(bound)
        return jnp.minimum(log_forget, 0)  # near f = 1, rounding may exceed 0
