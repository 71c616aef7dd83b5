"""Log-attention as fused GPU kernels: experimental, none has been run on a GPU.

`check` says which calls the kernels serve; `Fused` computes them. Mosaic GPU is the kernel language
of JAX that is maintained for Hopper and later; it ships with JAX, lowers without a GPU, and is
interpreted on a CPU, which is how the kernels are tested. CUDA C++ would need a compiler on users'
machines, and Pallas's Triton backend is being retired.

Kernels compute in one pass and test their sums afterwards. A result is exact to rounding if the
sums that it was divided by are far from the smallest normal number. Where any sum is not, all of
the call is computed again by `Chunked`, forward and backward.
"""

import importlib
from dataclasses import dataclass, field
from types import ModuleType

import jax
import jax.numpy as jnp

from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.mosaic.operands import DEPTHS
from heinsen_jax.ops.log_attention.variants import Implementation
from heinsen_jax.typing import Array, DTypeLike, Float

DEEPEST_OF_FLOAT32 = 64
HOPPER = 9.0


def is_available() -> bool:
    """Whether this process has a GPU that the kernels are written for."""
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    return any(float(getattr(gpu, "compute_capability", 0)) >= HOPPER for gpu in gpus)


def check(*, depths: tuple[int, int], dtype: DTypeLike, is_causal: bool) -> None:
    """Raises NotImplementedError where the kernels cannot serve a call."""
    if max(depths) > max(DEPTHS):
        reason = f"depths {depths} of keys and values are more than {max(DEPTHS)}"
    elif dtype == jnp.float64:
        reason = "there are no kernels of float64"
    elif max(depths) > DEEPEST_OF_FLOAT32 and dtype != jnp.bfloat16:
        reason = f"depths {depths} of float32 need more shared memory than there is: use bfloat16"
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        reason = "there are no kernels of complex log_value: use heinsen_attention"
    elif not is_causal:
        reason = "is_causal=False leaves nothing to fuse"
    elif not is_available():
        reason = "it needs an NVIDIA GPU of the Hopper generation or later"
    else:
        return
    raise NotImplementedError(f'implementation="gpu" (experimental): {reason}; or use "chunked"')


@dataclass(frozen=True)
class Fused:
    """implementation="gpu", for calls that `check` passes.

    Attributes:
      otherwise: computes calls whose sums leave the range that is safe for products.
    """

    otherwise: Implementation = field(default_factory=Chunked)

    def causal(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Float[Array, "B T G R V"], Float[Array, "B T G R"], Averages]:
        """Output, log Z and the state after all tokens, whose number is padded to a multiple of 64:
        a single token costs as much as 64."""
        return _calls().causal(self.otherwise, inputs, state, is_log=is_log)

    def bidirectional(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Float[Array, "B T G R V"], Averages]:
        raise NotImplementedError('implementation="gpu": is_causal=False; use "chunked"')


def _calls() -> ModuleType:
    """The module that calls kernels, imported at the first call: the parts of JAX in which kernels
    are written change from version to version, and do not exist on every system."""
    try:
        return importlib.import_module("heinsen_jax.ops.log_attention.mosaic.calls")
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f'implementation="gpu": JAX {jax.__version__} lacks what the kernels are written with '
            f'({error}); use "chunked", or a version of JAX that this project is tested with'
        ) from error
