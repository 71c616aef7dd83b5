"""Streams of chunks: launch of kernels, and iteration of a program over its chunks."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from heinsen_jax.ops.layout import varying_like
from heinsen_jax.ops.log_attention.mosaic.matrices import (
    BF16,
    F32,
    WIDEST_TILE,
    Factor,
    Layout,
    Ref,
    along,
    load,
    memory_of,
)
from heinsen_jax.ops.log_attention.mosaic.operands import CHUNK, Operands
from heinsen_jax.ops.numerics import where_empty
from heinsen_jax.typing import Array, DTypeLike, Float

Carry = TypeVar("Carry")
Index: TypeAlias = Array | int  # the index of a chunk
Tiles: TypeAlias = dict[str, Array]
"""Operands of one chunk, in registers, by name."""
Memory: TypeAlias = list[pl.MemoryRef]
"""Shared memory to reserve for a `Factor`."""
Kind: TypeAlias = tuple[int, jnp.dtype]
"""Number of features and dtype: outputs of one kind share a tile."""
Step: TypeAlias = Callable[[Index, Tiles, Carry], Carry]

FETCHED = ("query", "key", "value", "so_far", "at_end", "segment_of_query", "segment_of_key")
FETCHED += ("is_last", "carried", "y", "d_y", "log_z", "d_log_z", "d_total")
OF_COLUMNS = ("at_end", "carried", "segment_of_key")
PLATFORM = "cuda"
"""Platform for which kernels are lowered."""


class Scales(NamedTuple):
    """Scales of exponentials: `[K]` of one chunk, or `[B, H, J, K]` of all.

    Attributes:
      top: the largest exponent of the keys of a chunk and of the state before it.
      read: the factor that rescales the state before to `top`.
      top_after: the largest exponent in the state after, before the decay of the chunk.
      keep: the factor that rescales the state before to `top_after`.
    """

    top: Float[Array, "*N K"]
    read: Float[Array, "*N K"]
    top_after: Float[Array, "*N K"]
    keep: Float[Array, "*N K"]


class KernelCall:
    """Launcher of one program per head: sizes of a call, and memory for them.

    Attributes:
      is_log: whether values are logarithms.
      sizes: batch, heads, head dimensions of keys and of values, and rows of a transposed state.
    """

    def __init__(self, x: Operands, is_log: bool) -> None:
        batch, self.length, heads, key_depth = x.query.shape
        self.is_log = is_log
        self.sizes = batch, heads, key_depth, x.value.shape[-1], x.mean_before.shape[2]
        self.operands: dict[str, Array] = {
            name: array for name, array in vars(x).items() if array is not None
        }
        if x.segments is not None:  # one memory each for reading along rows and along columns
            segments = self.operands.pop("segments")
            self.operands |= {"segment_of_query": segments, "segment_of_key": segments}
        self.chunks = self.length // CHUNK
        self.heads_of_group = heads // x.key.shape[2]
        self.dtype = x.query.dtype
        self.parts = 1 if self.dtype == BF16 else 3
        # Cotangents of decay are sums over tokens, cotangents of shared keys sums over heads.
        is_summed = self.heads_of_group > 1 or x.so_far is not None
        self.gradient_dtype = F32 if is_summed else self.dtype
        # The factors of a product must have the same memory layout.
        self.tile_width = min(key_depth, x.value.shape[-1], WIDEST_TILE)

    def shape(self, *sizes: int, dtype: DTypeLike = F32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def rounded(self, x: Array) -> Array:
        """Convert x to the dtype of factors."""
        return x.astype(BF16).astype(F32) if self.parts == 1 else x

    def factor(self, rows: int, columns: int) -> Memory:
        """Return memory for a factor of products, part by part."""
        return [memory_of(rows, columns, BF16, self.tile_width)] * self.parts

    def launch(
        self,
        program: Callable[["Program"], None],
        inputs: dict[str, Array],
        outputs: dict[str, jax.ShapeDtypeStruct],
        scratch: dict[str, Memory],
    ) -> dict[str, Array]:
        """Run program(here) for each head of each sequence; on other platforms, return zeros, from
        which the caller infers that it has to compute otherwise."""
        operands = self.operands | inputs
        names = [*operands, *outputs]
        fetched = {
            name: self._tile_of(name, operands[name])
            for name in FETCHED
            if name in operands and not self._is_read_late(name)
        }
        staged = {_kind(x) for x in outputs.values() if len(x.shape) == 4 and x.dtype == BF16}
        memory = {
            "scratch": scratch,
            "tiles": fetched,
            "leaving": {kind: memory_of(CHUNK, *kind, WIDEST_TILE) for kind in staged},
            "barrier": plgpu.Barrier(num_arrivals=len(fetched)),
        }

        def body(*refs: Ref, **memory: Ref) -> None:
            program(Program(self, dict(zip(names, refs, strict=True)), **memory))

        batch, heads, *_ = self.sizes
        kernel = plgpu.kernel(
            body,
            out_type=list(outputs.values()),
            grid=(batch, heads),
            grid_names=("batch", "head"),
            scratch_types=memory,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Warpgroup
            ),
        )

        def by_kernel(*operands: Array) -> list[Array]:
            return varying_like(kernel(*operands), operands)

        def by_none(*operands: Array) -> list[Array]:
            zeros = [jnp.zeros(x.shape, x.dtype) for x in outputs.values()]
            return varying_like(zeros, operands)

        by_platform = {PLATFORM: by_kernel}
        results = lax.platform_dependent(*operands.values(), default=by_none, **by_platform)
        return dict(zip(outputs, results, strict=True))

    def _is_read_late(self, name: str) -> bool:
        """Return whether factors in three parts leave no shared memory for an operand."""
        return name == "so_far" and self.parts > 1 and self.operands[name].ndim == 4

    def _tile_of(self, name: str, array: Array) -> pl.MemoryRef:
        if name in ("at_end", "carried"):
            return plgpu.SMEM((array.shape[-1],), array.dtype)
        if array.ndim < 4:
            return plgpu.SMEM((CHUNK,), array.dtype)
        return memory_of(CHUNK, array.shape[-1], array.dtype, WIDEST_TILE)


def _kind(x: jax.ShapeDtypeStruct | Ref) -> Kind:
    return x.shape[-1], jnp.dtype(x.dtype)


class Exponentials(NamedTuple):
    """Exponentials of one chunk, for gradients.

    Attributes:
      query: divided by Z.
      key: as queries read it.
      absorbed: as the state after includes it; the same array if it includes all keys.
      scales: scales of these exponentials.
    """

    query: Float[Array, "C K"]
    key: Float[Array, "C K"]
    absorbed: Float[Array, "C K"]
    scales: Scales


class Program:
    """Program for one head of a sequence, and its chunks."""

    def __init__(
        self,
        call: KernelCall,
        refs: dict[str, Ref],
        *,
        scratch: dict[str, Factor],
        tiles: dict[str, Ref],
        leaving: dict[Kind, Ref],
        barrier: Ref,
    ) -> None:
        self.call, self.refs, self.scratch = call, refs, scratch
        self._tiles, self._leaving, self._barrier = tiles, leaving, barrier
        self.batch, self.head = lax.axis_index("batch"), lax.axis_index("head")
        self.group = self.head // call.heads_of_group

    # Products by 1 have no mark that an operand varies over the devices of a mesh: other arrays in
    # kernels have none, and the carries of a loop must have equal types.
    def of_group(self, name: str, layout: Layout) -> Array:
        """Return this group's part of an operand."""
        return 1.0 * load(self.refs[name].at[self.batch, self.group], layout)

    def of_head(self, name: str, layout: Layout) -> Array:
        """Return this head's part of an operand."""
        return 1.0 * load(self.refs[name].at[self.batch, self.head], layout)

    def stream(self, step: Step[Carry], carry: Carry, reverse: bool = False) -> Carry:
        """Iterate step(chunk, tiles, carry) over all chunks, each fetched while the preceding one
        is computed."""
        number = self.call.chunks

        def chunk(i: Index) -> Index:
            return number - 1 - i if reverse else i

        def one(i: Array, carry: Carry) -> Carry:
            plgpu.barrier_wait(self._barrier)
            tiles = self._loaded(chunk(i))
            plgpu.commit_smem()  # all threads have read them: memory may be reused

            @pl.when(i + 1 < number)
            def _() -> None:
                self._fetch(chunk(i + 1))

            return step(chunk(i), tiles, carry)

        self._fetch(chunk(0))
        carry = lax.fori_loop(0, number, one, carry)
        plgpu.wait_smem_to_gmem(0)
        return carry

    def _fetch(self, chunk: Index) -> None:
        for name, tile in self._tiles.items():
            plgpu.copy_gmem_to_smem(self._part(name, chunk), tile, self._barrier)

    def _part(self, name: str, chunk: Index) -> Ref:
        """Return the part of an operand that belongs to a chunk."""
        ref, tokens = self.refs[name], pl.ds(chunk * CHUNK, CHUNK)
        match name:
            case "segment_of_query" | "segment_of_key" | "is_last":
                return ref.at[self.batch, tokens]
            case "carried":
                return ref.at[self.batch, chunk]
            case "at_end":
                return ref.at[self.batch, self.group, chunk]
            case "so_far" if len(ref.shape) == 3:
                return ref.at[self.batch, self.group, tokens]
            case "key" | "value" | "so_far":
                return ref.at[self.batch, tokens, self.group]
            case "log_z" | "d_log_z" | "d_total":
                return ref.at[self.batch, self.head, tokens]
        return ref.at[self.batch, tokens, self.head]

    def _loaded(self, chunk: Index) -> Tiles:
        tiles: Tiles = {}
        if "so_far" in self.refs and "so_far" not in self._tiles:
            tiles["so_far"] = load(self._part("so_far", chunk), Layout.MATRIX)
        for name, tile in self._tiles.items():
            if len(tile.shape) == 2:
                tiles[name] = load(tile, Layout.MATRIX).astype(F32)
            else:
                tiles[name] = load(tile, Layout.COLUMN if name in OF_COLUMNS else Layout.ROW)
        return tiles

    def clear(self, name: str) -> None:
        for ref in self.scratch[name]:
            ref[...] = jnp.zeros(ref.shape, BF16)

    def end(self, scales: Scales, tiles: Tiles) -> Float[Array, " K"]:
        """Return the scale of the state after a chunk, as used by the next chunk."""
        return scales.top_after + tiles["at_end"] if "at_end" in tiles else scales.top_after

    def exponentials(self, tiles: Tiles, chunk: Index) -> Exponentials:
        """Return the exponentials for gradients, given the scales from `forward`."""
        here = self.batch, self.head, chunk
        scales = Scales(*(load(self.refs[x].at[*here], Layout.COLUMN) for x in Scales._fields))
        query = self.queries(tiles)
        scale = along(0, where_empty(scales.top, 0.0), query.shape)
        query = jnp.exp(query + scale - along(1, tiles["log_z"], query.shape))
        keys = self.keys(tiles)
        key = absorbed = self.relative(keys, scales.top)
        if "is_last" in tiles:
            is_last = along(1, tiles["is_last"], keys.shape) > 0
            absorbed = jnp.where(is_last, self.relative(keys, scales.top_after), 0.0)
        return Exponentials(query, key, absorbed, scales)

    def keys(self, tiles: Tiles) -> Float[Array, "C K"]:
        """Return keys relative to the start of the chunk: K - b, with b the decay so far."""
        return tiles["key"] - self._so_far(tiles)

    def queries(self, tiles: Tiles) -> Float[Array, "C K"]:
        """Q + b."""
        return tiles["query"] + self._so_far(tiles)

    def values(self, tiles: Tiles) -> Float[Array, "C V"]:
        """Return values in linear space."""
        return jnp.exp(tiles["value"]) if self.call.is_log else tiles["value"]

    def relative(self, keys: Float[Array, "C K"], scale: Float[Array, " K"]) -> Float[Array, "C K"]:
        """Return exp(keys - scale) as a factor of products."""
        return self.call.rounded(jnp.exp(keys - along(0, where_empty(scale, 0.0), keys.shape)))

    def _so_far(self, tiles: Tiles) -> Array | float:
        if "so_far" not in tiles:
            return 0.0
        decay = tiles["so_far"]
        if decay.ndim == 2:
            return decay
        return along(1, decay, (CHUNK, self.call.sizes[2]))

    def write(self, name: str, x: Float[Array, "C _"], chunk: Index) -> None:
        part, kind = self._part(name, chunk), _kind(self.refs[name])
        if kind not in self._leaving:  # four threads fill a sector of memory: no need to gather
            part[...] = x.astype(part.dtype)
            return
        tile = self._leaving[kind]
        plgpu.wait_smem_to_gmem(0)
        tile[...] = x.astype(tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, part)

    def write_row(self, name: str, x: Float[Array, " C"], chunk: Index) -> None:
        self.refs[name][self.batch, self.head, pl.ds(chunk * CHUNK, CHUNK)] = x

    def write_scales(self, scales: Scales, chunk: Index) -> None:
        for name, scale in scales._asdict().items():
            self.refs[name][self.batch, self.head, chunk, :] = scale

    def write_of_head(self, **arrays: Array) -> None:
        """Write this head's part of an output: vectors, or matrices."""
        for name, x in arrays.items():
            self.refs[name][self.batch, self.head, *[slice(None)] * x.ndim] = x


def visible(weights: Float[Array, "C C"], tiles: Tiles) -> Float[Array, "C C"]:
    """Zero the weights of masked keys."""
    query, key = (
        plgpu.broadcasted_iota(jnp.int32, weights.shape, axis, layout=Layout.MATRIX.value)
        for axis in (0, 1)
    )
    visible = query >= key
    if "segment_of_query" in tiles:
        query = along(1, tiles["segment_of_query"], weights.shape)
        key = along(0, tiles["segment_of_key"], weights.shape)
        visible = visible & (query == key)
    return jnp.where(visible, weights, 0.0)


def of_state_only(x: Float[Array, "C *F"], tiles: Tiles) -> Float[Array, "C *F"]:
    """Zero rows (or row vectors) where a segment has begun since the state before."""
    if "segment_of_query" not in tiles:
        return x
    segment = tiles["segment_of_query"]
    segment = along(1, segment, x.shape) if x.ndim == 2 else segment
    return jnp.where(segment == 0, x, 0.0)


def find_scales(
    key: Float[Array, "C K"], m: Float[Array, " K"], tiles: Tiles
) -> tuple[Scales, Float[Array, "C K"] | None]:
    """Return the scales of a chunk, and the keys that the state after includes; None if all."""
    top = jnp.maximum(m, jnp.max(key, 0))
    read = jnp.exp(m - where_empty(top, 0.0))
    if "is_last" not in tiles:
        return Scales(top, read, top, read), None
    absorbed = jnp.where(along(1, tiles["is_last"], key.shape) > 0, key, -jnp.inf)
    kept = m + tiles["carried"]
    top_after = jnp.maximum(kept, jnp.max(absorbed, 0))
    carried = jnp.exp(kept - where_empty(top_after, 0.0))
    return Scales(top, read, top_after, carried), absorbed
