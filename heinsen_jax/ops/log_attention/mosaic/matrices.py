"""Matrices of GPU kernels: in registers and in shared memory, in parts, and their products."""

import inspect
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from heinsen_jax.typing import Array

ROWS = 64  # of a product, at least
WIDEST_TILE = 64

MATRIX = plgpu.Layout.WGMMA
ROW = MATRIX.reduce(1)  # a number for each row
COLUMN = MATRIX.reduce(0)
F32, BF16 = jnp.float32, jnp.bfloat16
LOAD_INDEX = inspect.signature(plgpu.load).parameters.get("idx")  # asked for by JAX 0.10

Factor = list[Any]  # memory of a factor of products, part by part


def memory_of(rows: int, columns: int, dtype: Any, widest: int) -> Any:
    """Shared memory as tensor cores and their copies want it."""
    size = jnp.dtype(dtype).itemsize
    width = min(columns, widest, 128 // size)
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * size)
    return plgpu.SMEM((rows, columns), dtype, transforms=transforms)


def load(ref: Any, layout: Any) -> Array:
    needs_index = LOAD_INDEX is not None and LOAD_INDEX.default is LOAD_INDEX.empty
    return plgpu.load(ref, *[()] * needs_index, layout=layout, optimized=False)


def along(axis: int, x: Array, shape: tuple[int, ...]) -> Array:
    """A vector as a matrix of equal rows (0) or of equal columns (1)."""
    return lax.broadcast_in_dim(x, shape, (1 - axis,))


def put(refs: Factor, x: Array) -> None:
    """Writes a factor, part by part."""
    for ref in refs:
        part = x.astype(BF16)
        ref[...] = part
        x = x - part.astype(F32)


def left(refs: Factor, columns: int) -> Factor:
    return [ref.at[:, pl.ds(0, columns)] for ref in refs]


def top_rows(refs: Factor, rows: int) -> Factor:
    return [ref.at[pl.ds(0, rows)] for ref in refs]


def transposed(refs: Factor) -> Factor:
    return [_transpose(ref) for ref in refs]


def _transpose(ref: Any) -> Any:
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return plgpu.transpose_ref(ref, (1, 0))


def product(a: Factor, b: Factor, rows: int, columns: int) -> Array:
    """a b in float32, of factors in parts: what is smaller than rounding is left out."""

    def add(total):
        parts = len(a)
        for i in reversed(range(parts)):  # small ones first
            for j in reversed(range(parts - i)):
                plgpu.wgmma(total, a[i], b[j])
        return total[...]

    return pl.run_scoped(add, plgpu.ACC((rows, columns), F32))  # pyright: ignore[reportPrivateImportUsage]
