"""Matrices of GPU kernels in registers and shared memory, in parts, and their products."""

import inspect
from enum import Enum
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from heinsen_jax.typing import Array, DTypeLike, Float, Shaped

WIDEST_TILE = 64

F32, BF16 = jnp.float32, jnp.bfloat16
LOAD_INDEX = inspect.signature(plgpu.load).parameters.get("idx")  # required by JAX 0.10

Ref: TypeAlias = Any
"""Reference to memory inside a kernel; JAX has no public type for all kinds of them."""

Factor: TypeAlias = list[Ref]
"""Shared memory of a factor of products, part by part."""


class Layout(Enum):
    """Layout of arrays in registers of threads."""

    MATRIX = plgpu.Layout.WGMMA
    ROW = plgpu.Layout.WGMMA.reduce(1)  # one number per row of a matrix
    COLUMN = plgpu.Layout.WGMMA.reduce(0)


def memory_of(rows: int, columns: int, dtype: DTypeLike, widest: int) -> pl.MemoryRef:
    """Return shared memory in the layout required by tensor cores and asynchronous copies."""
    size = jnp.dtype(dtype).itemsize
    width = min(columns, widest, 128 // size)
    transforms = plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(width * size)
    return plgpu.SMEM((rows, columns), dtype, transforms=transforms)


def load(ref: Ref, layout: Layout) -> Array:
    needs_index = LOAD_INDEX is not None and LOAD_INDEX.default is LOAD_INDEX.empty
    return plgpu.load(ref, *[()] * needs_index, layout=layout.value, optimized=False)


def along(axis: int, x: Shaped[Array, "N"], shape: tuple[int, ...]) -> Shaped[Array, "R C"]:
    """Broadcast a vector to a matrix of equal rows (0) or of equal columns (1)."""
    return lax.broadcast_in_dim(x, shape, (1 - axis,))


def put(refs: Factor, x: Float[Array, "R C"]) -> None:
    """Write a factor, part by part."""
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


def _transpose(ref: Ref) -> Ref:
    if hasattr(ref, "transpose"):
        return ref.transpose((1, 0))
    return plgpu.transpose_ref(ref, (1, 0))


def product(a: Factor, b: Factor, rows: int, columns: int) -> Float[Array, "{rows} {columns}"]:
    """Multiply factors in parts, in float32, without products of parts below rounding."""

    def add(total: Ref) -> Array:
        parts = len(a)
        for i in reversed(range(parts)):  # small ones first
            for j in reversed(range(parts - i)):
                plgpu.wgmma(total, a[i], b[j])
        return total[...]

    return pl.run_scoped(add, plgpu.ACC((rows, columns), F32))  # pyright: ignore[reportPrivateImportUsage]
