"""Log-attention as fused GPU kernels, where their sums prove to be in range; else as `Chunked`.

Why Mosaic GPU, of what JAX offers to write kernels with: it is the one that is kept up for Hopper
and later, it ships with JAX, it lowers without a GPU, and JAX interprets it on a CPU, so that
these kernels are tested wherever the others are. CUDA C++ would need a compiler on users'
machines, and Pallas's Triton backend is being retired.

Kernels compute in one pass and test afterwards. A result is right to rounding if the sums that it
was divided by are far from the smallest number: all terms that matter in them were then normal
numbers. Where any is not, all of the call is computed again by `Chunked`, forward and backward.
"""

import importlib
import math
from dataclasses import dataclass, field
from types import ModuleType

import jax
import jax.numpy as jnp

from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.typing import Array, DTypeLike

DEPTHS = (32, 64, 128)
DEEPEST_OF_FLOAT32 = 64
HOPPER = 9.0


def is_available() -> bool:
    """Whether this process has a GPU that the kernels are for."""
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    return any(float(getattr(gpu, "compute_capability", 0)) >= HOPPER for gpu in gpus)


def check(*, depths: tuple[int, int], dtype: DTypeLike, is_causal: bool) -> None:
    """Raises NotImplementedError where the kernels cannot serve a call."""
    is_deep = max(depths) > DEEPEST_OF_FLOAT32
    if max(depths) > max(DEPTHS):
        reason = f"depths {depths} of keys and values are more than {max(DEPTHS)}"
    elif is_deep and dtype != jnp.bfloat16:
        reason = f"depths {depths} of float32 need more shared memory than there is: use bfloat16"
    elif dtype == jnp.float64:
        reason = "there are no kernels of float64"
    elif jnp.issubdtype(dtype, jnp.complexfloating):
        reason = "there are no kernels of complex log_value: use heinsen_attention"
    elif not is_causal:
        reason = "is_causal=False leaves nothing to fuse"
    elif not is_available():
        reason = "it needs an NVIDIA GPU of the Hopper generation or later"
    else:
        return
    raise NotImplementedError(f'implementation="gpu": {reason}; or use "chunked"')


@dataclass(frozen=True)
class Fused:
    """implementation="gpu".

    Attributes:
      otherwise: computes calls whose sums leave the range that is safe for products.
    """

    otherwise: Chunked = field(default_factory=Chunked)

    def causal(
        self, inputs: Inputs, state: Averages, *, is_log: bool
    ) -> tuple[Array, Array, Averages]:
        """As `Chunked.causal`."""
        return _calls().causal(self, inputs, state, is_log=is_log)

    def bidirectional(self, inputs: Inputs, state: Averages, *, is_log: bool):
        raise NotImplementedError(
            'implementation="gpu" with is_causal=False: without causality there is nothing to '
            'fuse; use "chunked", which reads one state by two matrix products'
        )

    def is_safe(self, margins: list[Array], largest: Array) -> Array:
        """Whether results are right whose smallest sums and largest values these are."""
        limit = math.exp(-Chunked().budget(jnp.float32))
        large = jnp.maximum(jnp.max(largest), 1.0)
        smallest = jnp.min(jnp.stack([jnp.min(margin) for margin in margins]))
        return (smallest >= limit * large) & jnp.isfinite(large)


def _calls() -> ModuleType:
    """What calls kernels. Imported when it is asked for: what JAX has for writing kernels changes
    from version to version, and is not there on every system."""
    try:
        return importlib.import_module("heinsen_jax.ops.log_attention.mosaic.calls")
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f'implementation="gpu": JAX {jax.__version__} lacks what the kernels are written with '
            f'({error}); use "chunked", or a version of JAX that this project is tested with'
        ) from error
