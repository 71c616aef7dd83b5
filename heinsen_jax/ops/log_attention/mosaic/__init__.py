"""Log-attention as fused GPU kernels: experimental, run on an H100 and an H200 only.

`check` tells whether the kernels support a call, `is_measured` whether they are the default for it;
`Fused` computes it. Mosaic GPU is the kernel language that JAX maintains for Hopper and later; it
ships with JAX, lowers without a GPU, and can be interpreted on a CPU, which is how tests run the
kernels without a GPU. CUDA C++ would need a compiler on users' machines, and Pallas's Triton
backend is being retired.

Kernels compute in one pass and test their sums afterwards. A result is exact up to rounding if its
normalizers are far from the smallest normal number. If any is not, or a program is lowered for
another platform, `Chunked` computes the whole call, forward and backward.
"""

import importlib
import os
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.mosaic.operands import DEPTHS
from heinsen_jax.ops.log_attention.variants import AttentionPasses
from heinsen_jax.typing import Array, DTypeLike, Float

DEEPEST_OF_FLOAT32 = 64
HOPPER = 9.0
MEASURED_DEVICES = "NVIDIA H100 80GB HBM3", "NVIDIA H200"
MEASURED_DEPTHS, LEAST_LENGTH, LEAST_HEADS, LEAST_TOKENS = (32, 64), 1024, 128, 786_432
"""Head dimensions, least numbers of tokens in a sequence and of heads in a batch, and least product
of the two, with which the kernels were measured to be faster than `Chunked`."""
SWITCH = "HEINSEN_JAX_GPU_KERNELS"
"""Environment variable: with 0, kernels are not chosen by default."""


def is_available() -> bool:
    """Return whether a device of JAX is a GPU that the kernels support."""
    return any(map(_is_supported, jax.devices()))


def _is_supported(device: Any) -> bool:
    try:
        return float(getattr(device, "compute_capability", 0)) >= HOPPER
    except ValueError:  # AMD's have names instead of numbers
        return False


def is_measured(*, depth: int, dtype: DTypeLike, length: int, num_heads: int) -> bool:
    """Whether the kernels were measured to be faster for a causal call without optional arguments,
    on the only device of JAX, and `SWITCH` is not 0.

    Args:
      depth: head dimension of queries, keys and values.
      dtype: dtype of all arrays.
      length: number of tokens of a sequence.
      num_heads: number of heads of all sequences, as many of keys and values as of queries.
    """
    if dtype != jnp.bfloat16 or depth not in MEASURED_DEPTHS or os.environ.get(SWITCH) == "0":
        return False
    if length < LEAST_LENGTH or num_heads < LEAST_HEADS or length * num_heads < LEAST_TOKENS:
        return False
    if [device.device_kind in MEASURED_DEVICES for device in jax.devices()] != [True]:
        return False
    try:
        _calls()
    except NotImplementedError:  # JAX lacks what the kernels are written with
        return False
    return True


def check(*, depths: tuple[int, int], dtype: DTypeLike, is_causal: bool) -> None:
    """Raise NotImplementedError if the kernels do not support a call."""
    if max(depths) > max(DEPTHS):
        reason = f"head dimensions {depths} exceed {max(DEPTHS)}"
    elif dtype == jnp.float64:
        reason = "float64 is unsupported"
    elif max(depths) > DEEPEST_OF_FLOAT32 and dtype != jnp.bfloat16:
        reason = f"head dimensions {depths} in float32 exceed the shared memory; use bfloat16"
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        reason = "complex log_value is unsupported; use heinsen_attention"
    elif not is_causal:
        reason = "is_causal=False is unsupported"
    elif not is_available():
        reason = "it needs an NVIDIA GPU of the Hopper generation or later"
    else:
        return
    raise NotImplementedError(f'implementation="gpu" (experimental): {reason}; or use "chunked"')


@dataclass(frozen=True)
class Fused:
    """implementation="gpu", for calls that `check` passes.

    Attributes:
      otherwise: fallback for calls whose sums exceed the safe range of products.
    """

    otherwise: AttentionPasses = field(default_factory=Chunked)

    def causal(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Float[Array, "B T G R V"], Float[Array, "B T G R"], Averages]:
        """Return output, log Z and the state after all tokens, padded to a multiple of 64: a single
        token costs as much as 64."""
        return _calls().causal(self.otherwise, inputs, state, is_log=is_log)

    def bidirectional(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Float[Array, "B T G R V"], Averages]:
        raise NotImplementedError('implementation="gpu": is_causal=False; use "chunked"')


def _calls() -> ModuleType:
    """Import the module that calls kernels, at the first call: the parts of JAX in which kernels
    are written change between versions, and do not exist on every system."""
    try:
        return importlib.import_module("heinsen_jax.ops.log_attention.mosaic.calls")
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f'implementation="gpu": JAX {jax.__version__} lacks what the kernels are written with '
            f'({error}); use "chunked", or a version of JAX that this project is tested with'
        ) from error
