"""Chains of matrix products and Lyapunov exponents, by floats and by logarithms.

    python benchmarks/goom.py [--long]

For products of random matrices, whose elements are standard normal: the number of products that are
finite and not 0, the time of one product in a chain, and the errors of the logarithms of the last
product, relative to a chain in float64 that is scaled after each product, and the memory that a
chain adds. For the Lorenz system, the time and the exponents of a sequence of QR decompositions and
of `lyapunov_exponents`. With `--long`, the time and the memory of longer chains instead.

The authors' chains are measured in the same process if their packages for PyTorch are installed:

    pip install torch git+https://github.com/glassroom/generalized_orders_of_magnitude \
        git+https://github.com/glassroom/torch_parallel_scan
"""

import importlib.util
import math
import sys
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from common import ROOT, added_memory, interleaved_medians, write_record

from heinsen_jax.goom import chain_products, largest_lyapunov_exponent, lyapunov_exponents

CHAINS = {16: 100_000, 128: 2000}
"""Products by the size of a matrix."""
LONG_CHAINS = {16: 1_000_000, 128: 10_000}
REPEATS = 3
AUTHORS = "torch", "generalized_orders_of_magnitude", "torch_parallel_scan"
HAS_AUTHORS = all(map(importlib.util.find_spec, AUTHORS))


def last_products(matrices: jax.Array) -> dict[str, Callable[[], Any]]:
    """Compiled chains of these matrices, by implementation."""
    return {
        name: partial(
            jax.jit(partial(chain_products, return_all=False, implementation=name)), matrices
        )
        for name in ("sequential", "parallel")
    }


def with_floats(matrices: jax.Array) -> jax.Array:
    start = jnp.eye(matrices.shape[-1], dtype=matrices.dtype)
    return jax.lax.scan(lambda state, matrix: (matrix @ state, None), start, matrices)[0]


def length_reached(matrices: jax.Array) -> int:
    """Products until a state is not finite, or 0."""

    def step(state: tuple[jax.Array, jax.Array], matrix: jax.Array):
        product, is_good = matrix @ state[0], state[1]
        is_good &= jnp.all(jnp.isfinite(product)) & jnp.any(product != 0)
        return (product, is_good), is_good

    start = jnp.eye(matrices.shape[-1], dtype=matrices.dtype), jnp.bool_(True)
    return int(jnp.sum(jax.jit(lambda x: jax.lax.scan(step, start, x)[1])(matrices)))


def logs_of_scaled_floats(matrices: np.ndarray) -> np.ndarray:
    state, log_scale = np.eye(matrices.shape[-1]), 0.0
    for matrix in matrices.astype(float):
        state = matrix @ state
        size = np.abs(state).max()
        state, log_scale = state / size, log_scale + math.log(size)
    return np.log(np.abs(state)) + log_scale


def authors_chains(matrices: np.ndarray) -> dict[str, Callable[[], Any]]:
    """The authors' chains of complex logarithms in PyTorch, without gradients, if installed."""
    if not HAS_AUTHORS:
        return {}
    torch, goom, scan = map(importlib.import_module, AUTHORS)
    given = torch.from_numpy(matrices.copy())

    def sequential() -> Any:
        logs = goom.log(given)
        state = logs[0]
        for factor in logs[1:]:
            state = goom.log_matmul_exp(factor, state)
        return state.real

    def parallel() -> Any:
        def later_first(earlier: Any, later: Any) -> Any:
            return goom.log_matmul_exp(later, earlier)

        return scan.reduce_scan(goom.log(given), later_first, dim=-3).real

    chains = {"PyTorch, sequential": sequential, "PyTorch, parallel": parallel}
    return {name: torch.no_grad()(chain) for name, chain in chains.items()}


def measured(functions: dict[str, Callable], *arguments: Any) -> dict[str, float]:
    calls = {name: partial(function, *arguments) for name, function in functions.items()}
    return interleaved_medians(calls, REPEATS)


def measure_chains() -> list[dict[str, Any]]:
    rows = []
    for size, length in CHAINS.items():
        matrices = jax.random.normal(jax.random.key(0), (length, size, size))
        wanted = logs_of_scaled_floats(np.asarray(matrices))
        chains = last_products(matrices)
        authors = authors_chains(np.asarray(matrices))
        ways = {"float32": partial(jax.jit(with_floats), matrices), **chains, **authors}
        reached = {"float32": length_reached(matrices)}
        with jax.enable_x64(True):
            double = jnp.asarray(np.asarray(matrices, float))
            reached["float64"] = length_reached(double)
            times = measured({"float64": jax.jit(with_floats)}, double)
        times |= interleaved_medians(ways, REPEATS)
        memory = {name: added_memory(call) for name, call in ways.items()}
        errors = {}
        for name, chain in (chains | authors).items():
            last = chain()
            logs = np.asarray(last.log_abs if name in chains else last, float)
            differences = np.abs(logs - wanted)
            errors[name] = {
                "median": float(np.median(differences)),
                "largest": float(differences.max()),  # of a sum that nearly cancels
            }
            reached[name] = length * int(np.all(np.isfinite(logs)))
        rows.append(
            {
                "size": size,
                "length": length,
                "largest_log": float(wanted.max()),
                "length_reached": reached,
                "microseconds_per_product": {x: 1e6 * s / length for x, s in times.items()},
                "errors_of_logs": errors,
                "added_bytes": memory,
            }
        )
        print(rows[-1], flush=True)
    return rows


def measure_long_chains() -> list[dict[str, Any]]:
    rows = []
    for size, length in LONG_CHAINS.items():
        matrices = jax.random.normal(jax.random.key(0), (length, size, size))
        for name, call in last_products(matrices).items():
            rows.append(
                {
                    "size": size,
                    "length": length,
                    "implementation": name,
                    "seconds": interleaved_medians({name: call}, 1)[name],
                    "added_bytes": added_memory(call),
                    "largest_log": float(jnp.max(call().log_abs)),
                }
            )
            print(rows[-1], flush=True)
    return rows


def lorenz_jacobians(length: int, dt: float) -> jax.Array:
    def velocity(p: jax.Array) -> jax.Array:
        x, y, z = p
        return jnp.array([10 * (y - x), x * (28 - z) - y, x * y - 8 / 3 * z])

    def step(p: jax.Array) -> jax.Array:
        a = velocity(p)
        b = velocity(p + dt / 2 * a)
        c = velocity(p + dt / 2 * b)
        return p + dt / 6 * (a + 2 * b + 2 * c + velocity(p + dt * c))

    start = jax.lax.fori_loop(0, 2000, lambda _, p: step(p), jnp.array([1.0, 1.0, 20.0]))
    points = jax.lax.scan(lambda p, _: (step(p), p), start, None, length=length)[1]
    return jax.vmap(jax.jacfwd(step))(points)


def in_sequence(jacobians: jax.Array, dt: float) -> jax.Array:
    def step(basis: jax.Array, matrix: jax.Array) -> tuple[jax.Array, jax.Array]:
        basis, triangle = jnp.linalg.qr(matrix @ basis)
        return basis, jnp.log(jnp.abs(jnp.diagonal(triangle)))

    return jnp.mean(jax.lax.scan(step, jnp.eye(3), jacobians)[1], 0) / dt


def measure_exponents(length: int = 100_000, dt: float = 0.01) -> dict[str, Any]:
    jacobians = jax.jit(lorenz_jacobians, static_argnums=0)(length, dt)
    ways = {
        "QR in sequence": jax.jit(in_sequence),
        "lyapunov_exponents": jax.jit(lambda x, dt: lyapunov_exponents(x, dt=dt)),
        "largest_lyapunov_exponent": jax.jit(lambda x, dt: largest_lyapunov_exponent(x, dt=dt)),
    }
    record = {
        "length": length,
        "published": [0.9056, 0, -14.5723],
        "seconds": measured(ways, jacobians, dt),
        "exponents": {name: np.asarray(way(jacobians, dt)).tolist() for name, way in ways.items()},
    }
    print(record, flush=True)
    return record


def main() -> int:
    if "--long" in sys.argv:
        record = {"chains": measure_long_chains()}
        write_record(ROOT / "benchmarks/results/goom_long.json", record)
        return 0
    record = {
        "torch": metadata.version("torch") if HAS_AUTHORS else None,
        "chains": measure_chains(),
        "lorenz": measure_exponents(),
    }
    write_record(ROOT / "benchmarks/results/goom.json", record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
