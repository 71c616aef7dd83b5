"""Generalized orders of magnitude (Heinsen and Kozachkov, 2025, arXiv:2510.03426): real numbers as
logarithms of their magnitudes, with signs, far beyond the range of floating point.

Examples assume that these functions, `jax`, `jax.numpy` as `jnp` and `numpy` as `np` are imported.
"""

from heinsen_jax.goom.chains import Reset, chain_products
from heinsen_jax.goom.lyapunov import largest_lyapunov_exponent, lyapunov_exponents
from heinsen_jax.goom.numbers import (
    Goom,
    add,
    dot,
    from_complex,
    from_goom,
    multiply,
    norm,
    sum,
    to_complex,
    to_goom,
)
from heinsen_jax.goom.wide import matmul

__all__ = [
    "Goom",
    "Reset",
    "add",
    "chain_products",
    "dot",
    "from_complex",
    "from_goom",
    "largest_lyapunov_exponent",
    "lyapunov_exponents",
    "matmul",
    "multiply",
    "norm",
    "sum",
    "to_complex",
    "to_goom",
]
