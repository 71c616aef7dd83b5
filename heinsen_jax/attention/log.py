"""Log-attention as a layer: the residual branch of Heinsen's (2024) language model."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from heinsen_jax.attention.base import Attention, Capabilities
from heinsen_jax.ops.log_attention import LogAttentionState, log_attention
from heinsen_jax.typing import Array


class LogAttention(Attention):
    """Projections, log-attention, and a gated output; no parameter is in the attention itself.

        q | k | log v = x W1 + b1                   for each head, next to one another
        y = GLU(log_attention(q, k, log v) W2 + b2) W3        GLU(a, b) = a * sigmoid(b)

    Heads are concatenated. The branch takes log Y as it is: values are never formed. Weights and
    biases are initialised uniformly in +-1/sqrt(fan_in).

    Args:
      model_dim: width D of the input and output.
      num_heads: number of heads.
      key_depth: features of a query or key head; model_dim / num_heads when None.
      value_depth: features of a value head; model_dim / num_heads when None.
      implementation: of `log_attention`; None chooses.
      dtype: of activations and matrix products; the attention itself computes in float32 at least.
      param_dtype: of parameters.
      rngs: the source of the initial weights.

    Raises:
      ValueError: model_dim is not a multiple of num_heads and a depth is None.

    References:
      Heinsen, 2024, Softmax Attention with Constant Cost per Token, arXiv:2404.05843.
    """

    capabilities = Capabilities(causal=True, streaming=True)

    def __init__(
        self,
        model_dim: int,
        num_heads: int,
        *,
        key_depth: int | None = None,
        value_depth: int | None = None,
        implementation: Any = None,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        self.num_heads = num_heads
        self.key_depth = key_depth or head_depth(model_dim, num_heads)
        self.value_depth = value_depth or head_depth(model_dim, num_heads)
        self.implementation = implementation
        inner = num_heads * (2 * self.key_depth + self.value_depth)
        dtypes = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.project = linear(model_dim, inner, ("embed", "heads"), **dtypes)
        self.gate = linear(num_heads * self.value_depth, 2 * model_dim, ("heads", "mlp"), **dtypes)
        self.output = linear(model_dim, model_dim, ("mlp", "embed"), use_bias=False, **dtypes)

    def __call__(
        self, x: Array, *, state: LogAttentionState | None = None, return_state: bool = False
    ) -> Any:
        heads = self.project(x)
        depth = 2 * self.key_depth + self.value_depth
        heads = heads.reshape(*x.shape[:-1], self.num_heads, depth)
        query, key, log_value = jnp.split(heads, [self.key_depth, 2 * self.key_depth], -1)
        with jax.named_scope("log_attention"):
            log_y, state = log_attention(
                query,
                key,
                log_value,
                initial_state=state,
                return_state=True,
                implementation=self.implementation,
            )
        log_y = log_y.reshape(*x.shape[:-1], self.num_heads * self.value_depth)
        y = self.output(jax.nn.glu(self.gate(log_y)))
        return (y, state) if return_state else y

    def init_state(self, batch_shape: Sequence[int]) -> LogAttentionState:
        dtype = jnp.promote_types(self.project.param_dtype, jnp.float32)
        return LogAttentionState.empty(
            batch_shape, self.num_heads, self.key_depth, self.value_depth, dtype
        )


def head_depth(model_dim: int, num_heads: int) -> int:
    """model_dim / num_heads, which must be whole."""
    if num_heads < 1 or model_dim % num_heads:
        raise ValueError(
            f"num_heads={num_heads} does not divide model_dim={model_dim}: change one of them, or "
            "give key_depth and value_depth"
        )
    return model_dim // num_heads


def linear(
    inputs: int,
    outputs: int,
    logical_axes: tuple[str, str],
    *,
    use_bias: bool = True,
    **kwargs: Any,
) -> nnx.Linear:
    """A dense layer with weight and bias ~ U(+-1/sqrt(fan_in)) and named axes (see `sharding`)."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        kernel_init=uniform(inputs**-0.5),
        bias_init=uniform(inputs**-0.5),
        kernel_metadata={"logical_axes": logical_axes},
        bias_metadata={"logical_axes": logical_axes[1:]},
        **kwargs,
    )


def uniform(bound: float) -> nnx.Initializer:
    """An initialiser of values uniform in +-bound."""

    def init(key: Array, shape: Sequence[int], dtype: Any = jnp.float32, **_: Any) -> Array:
        return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)

    return init
