"""Log-attention as fused GPU kernels, where their sums prove to be in range; else as `Chunked`.

Why Mosaic GPU, of what JAX offers to write kernels with: it is the one that is kept up for Hopper
and later, it ships with JAX, it lowers without a GPU, and JAX interprets it on a CPU, so that
these kernels are tested wherever the others are. CUDA C++ would need a compiler on users'
machines, and Pallas's Triton backend is being retired.

Kernels compute in one pass and test afterwards. A result is right to rounding if the sums that it
was divided by are far from the smallest number: all terms that matter in them were then normal
numbers. Where any is not, all of the call is computed again by `Chunked`, forward and backward.
One token, as in generation, has a kernel of its own, which is exact for all inputs.
"""

import importlib
import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from heinsen_jax.ops.log_attention.chunked import Chunked
from heinsen_jax.ops.log_attention.tokens import Tokens
from heinsen_jax.typing import Array

DEPTHS = (32, 64, 128)
DEEPEST_OF_FLOAT32 = 64
HOPPER = 9.0


def is_available() -> bool:
    """Whether this process has a GPU that the kernels are for."""
    gpus = [device for device in jax.devices() if device.platform == "gpu"]
    return any(float(getattr(gpu, "compute_capability", 0)) >= HOPPER for gpu in gpus)


@dataclass(frozen=True)
class Fused:
    """implementation="gpu".

    Attributes:
      otherwise: the implementation that computes calls whose sums leave the range that is safe for
        products, that of `Chunked`.
      spans: into how many pieces texts are cut, to be computed side by side; by their length and
        the number of heads when None.
    """

    otherwise: Any = field(default_factory=Chunked)
    spans: int | None = None

    def causal(self, tokens: Tokens, state: Any) -> tuple[Array, Array, Any]:
        """As `Chunked.causal`."""
        return _calls().causal(self, tokens, state)

    def bidirectional(self, tokens: Tokens, state: Any) -> tuple[Array, Any]:
        raise NotImplementedError(
            'implementation="gpu" with is_causal=False: without causality there is nothing to '
            'fuse; use "chunked", which reads one state by two matrix products'
        )

    def is_safe(self, margins: list[Array], largest: Array) -> Array:
        """Whether results are right whose smallest sums and largest values these are."""
        limit = math.exp(-Chunked().limit(jnp.float32))
        large = jnp.maximum(jnp.max(largest), 1.0)
        smallest = jnp.min(jnp.stack([jnp.min(margin) for margin in margins]))
        return (smallest >= limit * large) & jnp.isfinite(large)


def _calls() -> Any:
    """What calls kernels. Imported when it is asked for: what JAX has for writing kernels changes
    from version to version, and is not there on every system."""
    try:
        return importlib.import_module("heinsen_jax.ops.log_attention.gpu_calls")
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(
            f'implementation="gpu": JAX {jax.__version__} lacks what the kernels are written with '
            f'({error}); use "chunked", or a version of JAX that this project is tested with'
        ) from error
