"""Streams of chunks: what the kernels of log-attention read, and how a program walks over it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from heinsen_jax.ops.log_attention.gpu_matrices import (
    BF16,
    COLUMN,
    F32,
    MATRIX,
    ROW,
    WIDEST_TILE,
    Factor,
    along,
    load,
    memory_of,
    product,
    transposed,
)
from heinsen_jax.ops.numerics import share, where_empty
from heinsen_jax.typing import Array

CHUNK = 64
Tiles = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Operands:
    """What all kernels read. T is a multiple of 64; J = T / 64 chunks.

    Attributes:
      query: `[B, T, H, K]`.
      key: `[B, T, G, K]`.
      value: `[B, T, G, V]`, or their logarithms. All three float32, or all bfloat16.
      log_z_before: `[B, G, K]`, of the state before, and
      mean_before: `[B, G, V', K]`, V' = max(V, 64), with rows past V that are 0. Float32.
      so_far: decay from a chunk's start up to a token, `[B, G, T]` or `[B, T, G, K]`.
      at_end: decay of a whole chunk, `[B, G, J, K]`.
      documents: how many documents have begun in a token's chunk, up to it, `[B, T]`.
      is_last: 1 where that is as many as in the whole chunk, else 0, `[B, T]`.
      carried: `[B, J, K]`, -inf where a document begins in a chunk, else 0.
    """

    query: Array
    key: Array
    value: Array
    log_z_before: Array
    mean_before: Array
    so_far: Array | None = None
    at_end: Array | None = None
    documents: Array | None = None
    is_last: Array | None = None
    carried: Array | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Scales:
    """Of each chunk `[B, H, J, K]`.

    Attributes:
      top: largest exponent of what a chunk's queries see, and
      read: what the state before is multiplied by in that scale.
      top_after: largest exponent of what is in the state after, without the chunk's decay, and
      keep: what the state before is multiplied by in that one.
    """

    top: Array
    read: Array
    top_after: Array
    keep: Array


class Call:
    """The sizes of a call, memory for them, and how to launch a program for each head."""

    def __init__(self, x: Operands, by_group: bool = False):
        """A program for each head of queries, or of keys."""
        batch, self.length, heads, key_depth = (x.key if by_group else x.query).shape
        self.sizes = batch, heads, key_depth, x.value.shape[-1], x.mean_before.shape[2]
        left_out = ("query", "log_z_before", "mean_before") if by_group else ()
        arrays = {name: a for name, a in vars(x).items() if name not in left_out}
        self.operands = {name: a for name, a in arrays.items() if a is not None}
        if x.documents is not None:  # memory is read in one layout: along rows, and columns
            documents = self.operands.pop("documents")
            self.operands |= {"document_of_query": documents, "document_of_key": documents}
        self.chunks = self.length // CHUNK
        self.heads_a_group = heads // x.key.shape[2]
        self.parts = 1 if x.query.dtype == BF16 else 3
        self.dtype = x.query.dtype
        # Those of decay are sums of these over all tokens, those of shared keys over heads.
        is_summed = self.heads_a_group > 1 or x.so_far is not None
        self.gradient_dtype = F32 if is_summed else self.dtype
        # The factors of a product must lie in memory in the same way.
        self.tile_width = min(key_depth, x.value.shape[-1], WIDEST_TILE)

    def shape(self, *sizes: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def rounded(self, x: Array) -> Array:
        """What products take for x."""
        return x.astype(BF16).astype(F32) if self.parts == 1 else x

    def factor(self, rows: int, columns: int) -> Factor:
        """Memory for a factor of products, part by part."""
        return [memory_of(rows, columns, BF16, self.tile_width)] * self.parts

    def launch(
        self,
        program: Callable[["Program"], None],
        inputs: dict[str, Array],
        outputs: dict[str, Any],
        scratch: dict[str, Factor],
        without: tuple[str, ...] = (),
    ) -> dict[str, Array]:
        """Runs program(here) for each head of each text."""
        operands = self.operands | inputs
        operands = {name: operands[name] for name in operands if name not in without}
        names = [*operands, *outputs]
        fetched = {
            name: self._tile_of(name, operands)
            for name in _FETCHED
            if name in operands and not self.is_read_late(name)
        }
        staged = {_kind(x) for x in outputs.values() if len(x.shape) == 4 and x.dtype == BF16}
        memory = {
            "scratch": scratch,
            "tiles": fetched,
            "leaving": {kind: memory_of(CHUNK, *kind, WIDEST_TILE) for kind in staged},
            "barrier": plgpu.Barrier(num_arrivals=len(fetched)),
        }

        def body(*refs, **memory):
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
        return dict(zip(outputs, kernel(*operands.values()), strict=True))

    def is_read_late(self, name: str) -> bool:
        """What there is no memory for besides factors in three parts."""
        return name == "so_far" and self.parts > 1 and self.operands[name].ndim == 4

    def _tile_of(self, name: str, operands: dict[str, Array]) -> Any:
        array = operands[name]
        if name in ("at_end", "carried"):
            return plgpu.SMEM((array.shape[-1],), array.dtype)
        if array.ndim < 4:
            return plgpu.SMEM((CHUNK,), array.dtype)
        return memory_of(CHUNK, array.shape[-1], array.dtype, WIDEST_TILE)


def _kind(x: Any) -> tuple[int, Any]:
    """Of which one tile is enough, for all outputs."""
    return x.shape[-1], jnp.dtype(x.dtype)


SCALES = ("top", "read", "top_after", "keep")
_FETCHED = ("query", "key", "value", "so_far", "at_end", "document_of_query", "document_of_key")
_FETCHED += ("is_last", "carried", "y", "d_y", "log_z", "d_log_z", "d_total")
_OF_COLUMNS = ("at_end", "carried", "document_of_key")


class Exponentials(NamedTuple):
    """What gradients need of a chunk.

    Attributes:
      query: divided by Z.
      key: as queries see it, and
      absorbed: as the state after takes it in; the same array where all of it is.
      scales: which these are in.
    """

    query: Array
    key: Array
    absorbed: Array
    scales: Scales


class Program:
    """One program: a head of a text, and its chunks."""

    def __init__(self, call: Call, refs, *, scratch, tiles, leaving, barrier):
        self.call, self.refs, self.scratch = call, refs, scratch
        self._tiles, self._leaving, self._barrier = tiles, leaving, barrier
        self.batch, self.head = lax.axis_index("batch"), lax.axis_index("head")
        self.group = self.head // call.heads_a_group

    def first(self, name: str, layout: Any) -> Array:
        """Of what there is one for each group."""
        return load(self.refs[name].at[self.batch, self.group], layout)

    def stream(self, step: Callable, carry: Any, reverse: bool = False) -> Any:
        """Carries step(chunk, tiles, carry) over all chunks, each fetched while the one before it
        is computed."""
        number = self.call.chunks

        def chunk(i):
            return number - 1 - i if reverse else i

        def one(i, carry):
            plgpu.barrier_wait(self._barrier)
            tiles = self._loaded(chunk(i))
            plgpu.commit_smem()  # everyone has read them: they may be fetched anew

            @pl.when(i + 1 < number)
            def _():
                self._fetch(chunk(i + 1))

            return step(chunk(i), tiles, carry)

        self._fetch(chunk(0))
        carry = lax.fori_loop(0, number, one, carry)
        plgpu.wait_smem_to_gmem(0)
        return carry

    def _fetch(self, chunk: Any) -> None:
        for name, tile in self._tiles.items():
            plgpu.copy_gmem_to_smem(self._part(name, chunk), tile, self._barrier)

    def _part(self, name: str, chunk: Any) -> Any:
        """What belongs to a chunk."""
        ref, tokens = self.refs[name], pl.ds(chunk * CHUNK, CHUNK)
        match name:
            case "document_of_query" | "document_of_key" | "is_last":
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

    def _loaded(self, chunk: Any) -> Tiles:
        tiles: Tiles = {}
        if "so_far" in self.refs and "so_far" not in self._tiles:
            tiles["so_far"] = load(self._part("so_far", chunk), MATRIX)
        for name, tile in self._tiles.items():
            if len(tile.shape) == 2:
                tiles[name] = load(tile, MATRIX).astype(F32)
            else:
                tiles[name] = load(tile, COLUMN if name in _OF_COLUMNS else ROW)
        return tiles

    def clear(self, name: str) -> None:
        for ref in self.scratch[name]:
            ref[...] = jnp.zeros(ref.shape, BF16)

    def end(self, scales: Scales, tiles: Tiles) -> Array:
        """The scale of the state after a chunk, as the next one finds it."""
        return scales.top_after + tiles["at_end"] if "at_end" in tiles else scales.top_after

    def query_exponentials(self, tiles: Tiles, chunk: Any) -> tuple[Array, Scales]:
        """For gradients: queries divided by Z, and the scales."""
        here = self.batch, self.head, chunk
        scales = Scales(*(load(self.refs[x].at[*here], COLUMN) for x in SCALES))
        query = self.queries(tiles)
        scale = along(0, where_empty(scales.top, 0.0), query.shape)
        return jnp.exp(query + scale - along(1, tiles["log_z"], query.shape)), scales

    def gradient_after(self) -> tuple[Array, Array]:
        """Of z and S of the state after all chunks."""
        layouts = {"d_z_after": COLUMN, "d_sum_after": MATRIX}
        d_z, d_sum = (
            load(self.refs[name].at[self.batch, self.head], layout)
            for name, layout in layouts.items()
        )
        return d_z, d_sum

    def gradient_before(
        self, d_after: tuple[Array, Array], query: Array, tiles: Tiles, scales: Scales
    ) -> tuple[Array, Array]:
        """Of the state before a chunk, from that of the one after and from the queries that read
        it, whose factors are in memory."""
        d_z, d_sum = d_after
        read = product(transposed(self.scratch["d_y"]), self.scratch["q"], *d_sum.shape)
        d_sum = d_sum * along(0, scales.keep, d_sum.shape)
        d_sum = d_sum + read * along(0, scales.read, read.shape)
        read = jnp.sum(query * along(1, tiles["d_total"], query.shape), 0)
        return d_z * scales.keep + read * scales.read, d_sum

    def finish_state_gradient(self, d_before: tuple[Array, Array]) -> None:
        self.refs["d_z"][self.batch, self.head, :] = d_before[0]
        self.refs["d_sum"][self.batch, self.head, :, :] = d_before[1]

    def exponentials(self, tiles: Tiles, chunk: Any) -> Exponentials:
        """For gradients, from the scales that `forward` found."""
        query, scales = self.query_exponentials(tiles, chunk)
        keys = self.keys(tiles)
        key = absorbed = self.relative(keys, scales.top)
        if "is_last" in tiles:
            is_last = along(1, tiles["is_last"], keys.shape) > 0
            absorbed = jnp.where(is_last, self.relative(keys, scales.top_after), 0.0)
        return Exponentials(query, key, absorbed, scales)

    def keys(self, tiles: Tiles) -> Array:
        """As the chunk's start would see them."""
        return tiles["key"] - self._so_far(tiles)

    def relative(self, keys: Array, scale: Array) -> Array:
        """exp(keys - scale), as products take it."""
        return self.call.rounded(jnp.exp(keys - along(0, where_empty(scale, 0.0), keys.shape)))

    def values(self, tiles: Tiles, is_log: bool) -> Array:
        """In linear space."""
        return jnp.exp(tiles["value"]) if is_log else tiles["value"]

    def queries(self, tiles: Tiles) -> Array:
        return tiles["query"] + self._so_far(tiles)

    def _so_far(self, tiles: Tiles) -> Any:
        if "so_far" not in tiles:
            return 0.0
        decay = tiles["so_far"]
        if decay.ndim == 2:
            return decay
        return along(1, decay, (CHUNK, self.call.sizes[2]))

    def write(self, name: str, x: Array, chunk: Any) -> None:
        part, kind = self._part(name, chunk), _kind(self.refs[name])
        if kind not in self._leaving:  # four threads fill a sector of memory: no need to gather
            part[...] = x.astype(part.dtype)
            return
        tile = self._leaving[kind]
        plgpu.wait_smem_to_gmem(0)
        tile[...] = x.astype(tile.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(tile, part)

    def write_row(self, name: str, x: Array, chunk: Any) -> None:
        self.refs[name][self.batch, self.head, pl.ds(chunk * CHUNK, CHUNK)] = x


def visible(weights: Array, tiles: Tiles) -> Array:
    """With 0 where a query, a row, must not see a key."""
    query, key = (
        plgpu.broadcasted_iota(jnp.int32, weights.shape, axis, layout=MATRIX) for axis in (0, 1)
    )
    visible = query >= key
    if "document_of_query" in tiles:
        query = along(1, tiles["document_of_query"], weights.shape)
        key = along(0, tiles["document_of_key"], weights.shape)
        visible = visible & (query == key)
    return jnp.where(visible, weights, 0.0)


def of_state_only(x: Array, tiles: Tiles) -> Array:
    """Rows, or numbers of rows, with 0 where a document has begun since the state."""
    if "document_of_query" not in tiles:
        return x
    document = tiles["document_of_query"]
    document = along(1, document, x.shape) if x.ndim == 2 else document
    return jnp.where(document == 0, x, 0.0)


def find_scales(key: Array, m: Array, tiles: Tiles) -> tuple[Scales, Array | None]:
    """The scales of a chunk, and those of its keys that the state after takes in; None if all."""
    top = jnp.maximum(m, jnp.max(key, 0))
    read = share(m, top)
    if "is_last" not in tiles:
        return Scales(top, read, top, read), None
    absorbed = jnp.where(along(1, tiles["is_last"], key.shape) > 0, key, -jnp.inf)
    kept = m + tiles["carried"]
    top_after = jnp.maximum(kept, jnp.max(absorbed, 0))
    return Scales(top, read, top_after, share(kept, top_after)), absorbed
