"""Building blocks of layers: dense maps, norms and parameters, with initializers and logical axes.

All take the options of a layer, `dtype, param_dtype, rngs`, as keywords.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import jax
import jax.numpy as jnp
from flax import nnx

from heinsen_jax.typing import Array, DTypeLike, Key, common_dtype, wide

ParameterKind: TypeAlias = Literal["matrix", "embedding", "vector"]
"""Kind of a parameter for the optimizer, in the metadata `kind` of its variable.

matrix: a linear map between hidden features (last two axes): decayed; orthogonalized by Muon.
embedding: a table of vectors, or a map of embeddings: decayed; updated by Adam under Muon.
vector: biases, scales, rates, depthwise filters, trained tokens: not decayed; updated by Adam under
Muon.
"""

EPSILONS = {"layer": 1e-5, "rms": 1e-6, "zero_centered_rms": 1e-6}
"""Default epsilons of norms."""


LogicalAxes: TypeAlias = tuple[str | None, ...]
"""Names of axes in the rules of `sharding`; None for one that is not split."""


class LayerOptions(TypedDict):
    """Options of a layer besides its sizes.

    Attributes:
      dtype: dtype of activations and matrix products; the inputs' dtype when None.
      param_dtype: dtype of the parameters; of vectors such as scales of norms, at least float32.
      rngs: the source of the initial weights.
    """

    dtype: DTypeLike | None
    param_dtype: DTypeLike
    rngs: nnx.Rngs


class DenseOptions(TypedDict):
    """Initializers and logical axes of an `nnx.Linear`."""

    kernel_init: nnx.Initializer
    bias_init: nnx.Initializer
    kernel_metadata: dict[str, Any]
    bias_metadata: dict[str, Any]


def linear(
    inputs: int,
    outputs: int,
    logical_axes: LogicalAxes,
    *,
    use_bias: bool = True,
    kind: ParameterKind = "matrix",
    lora_rank: int | None = None,
    **options: Unpack[LayerOptions],
) -> nnx.Linear:
    """A dense layer with weight and bias ~ U(+-1/sqrt(fan_in)) and logical axes (`sharding`); with
    no axes it is replicated. The weight is of the given kind. With a `lora_rank`, a product of two
    matrices in at least float32 is added to it, initially 0."""
    dense = dense_options(inputs, logical_axes, kind)
    if lora_rank is None:
        return nnx.Linear(inputs, outputs, use_bias=use_bias, **dense, **options)
    metadata = {"kind": "matrix"}
    return nnx.LoRALinear(
        inputs,
        outputs,
        use_bias=use_bias,
        lora_rank=lora_rank,
        lora_dtype=options["dtype"],
        lora_param_dtype=wide(options["param_dtype"]),
        a_metadata=metadata,
        b_metadata=metadata,
        **dense,
        **options,
    )


def dense_options(
    inputs: int, logical_axes: LogicalAxes, kind: ParameterKind = "matrix"
) -> DenseOptions:
    """Initializers and metadata of a dense layer with this number of inputs. Its bias, a vector, is
    at least float32."""
    return {
        "kernel_init": uniform(inputs**-0.5),
        "bias_init": in_wide_dtype(uniform(inputs**-0.5)),
        "kernel_metadata": {"logical_axes": logical_axes, "kind": kind},
        "bias_metadata": {"logical_axes": logical_axes[1:], "kind": "vector"},
    }


def decay_projection(
    inputs: int,
    outputs: int,
    max_timescale: float,
    min_timescale: float = 1.0,
    **options: Unpack[LayerOptions],
) -> nnx.Linear:
    """A dense layer z = x W + b for log decays log sigmoid(z), initially about -1 / timescale: time
    constants, in tokens, form a geometric sequence from `max_timescale` to `min_timescale`."""
    layer = linear(inputs, outputs, ("embed", "heads"), **options)
    dtype = wide(options["param_dtype"])
    timescales = jnp.geomspace(max_timescale, min_timescale, outputs, dtype=dtype)
    assert layer.bias is not None
    layer.bias[...] = jnp.log(timescales)  # log sigmoid(b) is about -exp(-b)
    return layer


class LowRank(nnx.Module):
    """x W W' + b, for W of few columns; split by `fsdp` alone."""

    def __init__(
        self,
        inputs: int,
        rank: int,
        outputs: int,
        *,
        use_bias: bool = True,
        **options: Unpack[LayerOptions],
    ) -> None:
        self.down = linear(inputs, rank, ("embed", None), use_bias=False, **options)
        self.up = linear(rank, outputs, ("rank", None), use_bias=use_bias, **options)

    def __call__(self, x: Array) -> Array:
        return self.up(self.down(x))


class LayerNorm(nnx.LayerNorm):
    """(x - mean) / sqrt(var + epsilon) * w + b over the last axis, in at least the dtype of w and
    b; without w and b, in at least float32, if not `has_parameters`."""

    def __init__(
        self,
        size: int,
        *,
        epsilon: float | None = None,
        has_parameters: bool = True,
        **options: Unpack[LayerOptions],
    ):
        metadata = {"logical_axes": ("embed",), "kind": "vector"}
        super().__init__(
            size,
            epsilon=epsilon or EPSILONS["layer"],
            use_bias=has_parameters,
            use_scale=has_parameters,
            use_fast_variance=False,  # which is wrong where the mean is large
            param_dtype=wide(options["param_dtype"]),
            scale_metadata=metadata,
            bias_metadata=metadata,
            rngs=options["rngs"],
        )

    def __call__(self, x: Array, **options: Any) -> Array:
        return super().__call__(x.astype(common_dtype(x, self.param_dtype)), **options)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + epsilon) * w, in at least the dtype of w, with means of groups of
    adjacent features; if zero-centered, * (1 + w) for w initially 0.

    References:
      Gemma Team, 2024, Gemma, arXiv:2403.08295 (zero-centered); Dao and Gu, 2024, Transformers are
      SSMs, arXiv:2405.21060 (groups).
    """

    def __init__(
        self,
        size: int,
        *,
        epsilon: float | None = None,
        num_groups: int = 1,
        is_zero_centered: bool = False,
        **options: Unpack[LayerOptions],
    ):
        self.epsilon = epsilon or EPSILONS["rms"]
        self.num_groups, self.offset = num_groups, int(is_zero_centered)
        init = nnx.initializers.constant(1 - self.offset)
        self.scale = parameter(init, size, kind="vector", **options)

    def __call__(self, x: Array) -> Array:
        x = x.astype(common_dtype(x, self.scale.dtype))
        groups = x
        if self.num_groups > 1:
            groups = x.reshape(*x.shape[:-1], self.num_groups, x.shape[-1] // self.num_groups)
        mean = jnp.mean(groups * groups, -1, keepdims=True)
        normed = (groups * jax.lax.rsqrt(mean + self.epsilon)).reshape(x.shape)
        return normed * jnp.broadcast_to(self.offset + self.scale[...], x.shape)


NORMS = {
    "layer": LayerNorm,
    "rms": RMSNorm,
    "zero_centered_rms": partial(RMSNorm, is_zero_centered=True),
}


LORA = ".lora."
"""Part of the names of low-rank additions."""


def lora(inputs: int, rank: int, outputs: int, **options: Unpack[LayerOptions]) -> nnx.LoRA:
    """Low-rank map x A B, for A `[inputs, rank]` and B `[rank, outputs]`, initially 0, in at least
    float32."""
    metadata = {"kind": "matrix"}
    options["param_dtype"] = wide(options["param_dtype"])
    return nnx.LoRA(inputs, rank, outputs, a_metadata=metadata, b_metadata=metadata, **options)


def parameter(
    init: nnx.Initializer,
    *shape: int,
    kind: ParameterKind,
    logical_axes: LogicalAxes = (),
    **options: Unpack[LayerOptions],
) -> nnx.Param[Array]:
    """A single parameter with logical axes (`sharding`); with none it is replicated. A vector is at
    least float32."""
    param_dtype = jnp.dtype(options["param_dtype"])
    if kind == "vector":
        param_dtype = wide(param_dtype)
    value = init(options["rngs"].params(), shape, param_dtype)
    return nnx.Param(value, kind=kind, logical_axes=logical_axes)


def scaled(factor: float, x: Array) -> Array:
    """factor * x, without a product if the factor is 1."""
    return x if factor == 1 else factor * x


def uniform(bound: float) -> nnx.Initializer:
    """An initializer of values uniform in +-bound."""

    def init(key: Key[Array, ""], shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
        return jax.random.uniform(key, tuple(shape), dtype, -bound, bound)

    return init


def orthogonal(gain: float) -> nnx.Initializer:
    """An initializer of orthogonal matrices times `gain`, from a decomposition in at least
    float32."""
    init = nnx.initializers.orthogonal(gain)
    return lambda key, shape, dtype=jnp.float32: init(key, shape, wide(dtype)).astype(dtype)


def in_wide_dtype(init: nnx.Initializer) -> nnx.Initializer:
    """An initializer of values in at least float32."""
    return lambda key, shape, dtype=jnp.float32: init(key, shape, wide(dtype))


def in_float32(x: Array) -> Array:
    """x in at least float32, for gates."""
    return x.astype(wide(x.dtype))


def identity(key: Key[Array, ""], shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
    """An initializer of identity matrices over the last two axes."""
    del key
    return jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), tuple(shape))


def log_of_uniform(low: float, high: float) -> nnx.Initializer:
    """An initializer of logarithms of values uniform in [low, high]."""

    def init(key: Key[Array, ""], shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
        return jnp.log(jax.random.uniform(key, tuple(shape), dtype, low, high))

    return init


def inverse_softplus_of_log_uniform(low: float, high: float) -> nnx.Initializer:
    """An initializer of values whose softplus is log-uniform in [low, high]."""

    def init(key: Key[Array, ""], shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> Array:
        bounds = math.log(low), math.log(high)
        value = jnp.exp(jax.random.uniform(key, tuple(shape), dtype, *bounds))
        return value + jnp.log(-jnp.expm1(-value))

    return init
