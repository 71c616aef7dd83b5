"""What the layers are made of: dense maps, norms and parameters, with first values and axes' names.

All take the options of a layer, `dtype, param_dtype, rngs`, as keywords.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from heinsen_jax.typing import Array

LAYER_NORM_EPSILON = 1e-5
RMS_EPSILON = 1e-6


def linear(
    inputs: int,
    outputs: int,
    logical_axes: tuple[str, str],
    *,
    use_bias: bool = True,
    **options: Any,
) -> nnx.Linear:
    """A dense layer with weight and bias ~ U(+-1/sqrt(fan_in)) and named axes (see `sharding`)."""
    return nnx.Linear(
        inputs, outputs, use_bias=use_bias, **dense_options(inputs, logical_axes), **options
    )


def dense_options(inputs: int, logical_axes: tuple[str, str]) -> dict[str, Any]:
    """What `linear` tells `nnx.Linear`."""
    return {
        "kernel_init": uniform(inputs**-0.5),
        "bias_init": uniform(inputs**-0.5),
        "kernel_metadata": {"logical_axes": logical_axes},
        "bias_metadata": {"logical_axes": logical_axes[1:]},
    }


def layer_norm(size: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> nnx.LayerNorm:
    """Layer normalisation, in the parameters' type."""
    del dtype
    return nnx.LayerNorm(
        size,
        epsilon=LAYER_NORM_EPSILON,
        param_dtype=jnp.dtype(param_dtype),
        scale_metadata={"logical_axes": ("embed",)},
        bias_metadata={"logical_axes": ("embed",)},
        rngs=rngs,
    )


def rms_norm(size: int, *, dtype: Any, param_dtype: Any, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """Normalisation by the root of the mean square, in the parameters' type."""
    del dtype
    return nnx.RMSNorm(size, epsilon=RMS_EPSILON, param_dtype=jnp.dtype(param_dtype), rngs=rngs)


def parameter(
    init: nnx.Initializer, *shape: int, dtype: Any, param_dtype: Any, rngs: nnx.Rngs
) -> nnx.Param:
    """A parameter of its own."""
    del dtype
    return nnx.Param(init(rngs.params(), shape, jnp.dtype(param_dtype)))


def uniform(bound: float) -> nnx.Initializer:
    """An initialiser of values uniform in +-bound."""

    def init(key: Array, shape: Sequence[int], dtype: Any = jnp.float32, **_: Any) -> Array:
        return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)

    return init
