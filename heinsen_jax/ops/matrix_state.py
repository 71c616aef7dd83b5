r"""Chunked form of attention whose state is a matrix per head, with decay and erasure.

The recurrence, with keys k, values v, log decays g <= 0 and erasing vectors r, is

    S_t = (I - k_t r_t^T) Diag(exp g_t) S_(t-1) + k_t v_t^T,      o_t = S_t^T q_t

in the state S `[K, V]`. Let G_t be the sum of the log decays of a chunk up to token t, and S the
state before the chunk. With the scores of tokens s <= t of the chunk,

    P_ts = sum_c q_tc k_sc exp(G_tc - G_sc),    A_ts = sum_c r_tc k_sc exp(G_tc - G_sc),  s < t

the values to be written, U, solve a triangular system, and outputs and state follow by matrix
products (Yang et al., 2024, arXiv:2406.06484 and arXiv:2412.06464):

    U = (I + A)^-1 (v - (r exp G) S)
    o = (q exp G) S + P U,      S <- exp(G_C) S + (k exp(G_C - G))^T U

Without erasure U = v. All but the terms in S is computed for the chunks of a block in parallel.

Values and gradients are accurate for decays of any size, -inf included: exponents are sums of log
decays, at most 0, except in two places, where differences of sums are exact (`_between`) or small
(`by_differences`).
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from heinsen_jax.ops.arguments import segment_starts
from heinsen_jax.ops.choice import first_safe
from heinsen_jax.ops.layout import (
    chunk,
    is_at_most,
    nearly_equal_blocks,
    unchunk,
    varying_like,
)
from heinsen_jax.ops.numerics import einsum, matmul, split_exact
from heinsen_jax.typing import Array, DTypeLike, Float

CHUNK, SMALL_CHUNK = 32, 16  # tokens; small with decay by feature or with erasure
CHUNKS_IN_BLOCK = 8  # computed in parallel; the backward pass saves one state per block
SMALL_DECAY = 32.0  # nats of decay in a chunk up to which sums may be subtracted
INVERSE = "inverse"  # the one intermediate result that is not recomputed in the backward pass
QUANTUM = 2.0**-10  # unit of the part of a decay whose sums are exact


class MatrixOperands(NamedTuple):
    """Operands of the recurrence; after `chunk`, all of them `[J, X, C, features]`.

    query `[B, T, G, R, K]`, key `[B, T, G, K]`, value `[B, T, N, V]`; log decays of heads
    `[B, T, N, 1]` and of key features `[B, T, N, K]`, and the share `[B, T, N, 1 or K]` of a key's
    values that is erased, r = erase * k; or None. N / G value heads share a key. With another key e
    `[B, T, G, K]`, r = e, and S_t lacks (erase * e) r^T exp(g) S_(t-1).
    """

    query: Array
    key: Array
    value: Array
    head_decay: Array | None = None
    feature_decay: Array | None = None
    erase: Array | None = None
    other: Array | None = None


def segment_decay(
    segment_ids: Array | None, valid: Array | None, groups: int, dtype: DTypeLike
) -> Array | None:
    """Return log decays of heads `[B, T, G, 1]` that separate segments: -inf where one starts,
    otherwise 0; or None without segments."""
    if segment_ids is None:
        return None
    *batch, length = segment_ids.shape
    starts = segment_starts(segment_ids, valid)
    decay = jnp.where(starts, -jnp.inf, jnp.zeros(starts.shape, dtype))
    decay = decay.reshape(math.prod(batch), length, 1, 1)
    return jnp.broadcast_to(decay, (*decay.shape[:2], groups, 1))


# Compiled once outside another `jit`.
@partial(jax.jit, static_argnames="attends_to_itself")
def recur(
    tokens: MatrixOperands, state: Float[Array, "X K V"], *, attends_to_itself: bool = True
) -> tuple[Float[Array, "B T N R V"], Float[Array, "X K V"]]:
    """Return o, and the state after all tokens; X = B N.

    If `attends_to_itself` is False, without erasure only, o_t lacks the term of token t.
    """
    batch, length, groups, heads, _ = tokens.query.shape
    size, blocks = _in_blocks(tokens)
    value_heads = tokens.value.shape[2]

    def block(state: Array, tokens: MatrixOperands) -> tuple[Array, Array]:
        chunks = jax.tree.map(partial(chunk, size=size), tokens)
        if value_heads != groups:  # only for the tokens of a block
            shared = partial(jnp.repeat, repeats=value_heads // groups, axis=1)
            keys = {"key": shared(chunks.key), "other": jax.tree.map(shared, chunks.other)}
            chunks = chunks._replace(query=shared(chunks.query), **keys)
        run = _block if chunks.other is None else _block_of_two_keys
        state, y = run(state, chunks, heads=heads, attends_to_itself=attends_to_itself)
        return state, unchunk(y, value_heads, heads)

    if blocks.key.shape[0] != 1:
        saved = jax.checkpoint_policies.save_only_these_names(INVERSE)
        block = jax.checkpoint(block, prevent_cse=False, policy=saved)
    after, y = lax.scan(block, varying_like(state, tokens), blocks)
    y = jnp.moveaxis(y, 0, 1).reshape(batch, y.shape[0] * y.shape[2], *y.shape[3:])
    return y[:, :length], after


def recur_with_normalizer(
    tokens: MatrixOperands,
    s: Float[Array, "X K V"],
    z: Float[Array, "X K"],
    *,
    attends_to_itself: bool = True,
) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return the outputs of the recurrence for the values `[B, T, G, R, V]` and for values of 1
    `[B, T, G, R, 1]`, and both states after all tokens: z is one more column of the matrix s."""
    value = jnp.concatenate([tokens.value, jnp.ones_like(tokens.value[..., :1])], -1)
    columns = jnp.concatenate([s, z[..., None]], -1)
    tokens = tokens._replace(value=value)
    y, after = recur(tokens, columns, attends_to_itself=attends_to_itself)
    return (y[..., :-1], y[..., -1:]), (after[..., :-1], after[..., -1])


def _in_blocks(tokens: MatrixOperands) -> tuple[int, MatrixOperands]:
    """Return the size of a chunk, and the tokens in blocks of chunks `[I, B, J C, ...]`, padded
    with tokens without any effect."""
    batch, length = tokens.key.shape[:2]
    is_plain = tokens.feature_decay is None and tokens.erase is None
    size = CHUNK if is_plain else SMALL_CHUNK
    while length > 0 and is_at_most(length, size // 2):
        size //= 2
    blocks, in_block = nearly_equal_blocks(max(length, 1), CHUNKS_IN_BLOCK * size, size)
    missing = blocks * in_block - length

    def split(x: Array) -> Array:
        if missing:
            x = jnp.pad(x, [(0, 0), (0, missing)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(batch, blocks, in_block, *x.shape[2:]), 1, 0)

    return size, jax.tree.map(split, tokens)


def _block(
    state: Array, chunks: MatrixOperands, *, heads: int, attends_to_itself: bool
) -> tuple[Array, Array]:
    """Return the state after the chunks of a block `[X, K, V]`, and their outputs
    `[J, X, R C, V]`."""
    key, value, erase = chunks.key, chunks.value, chunks.erase
    erase = None if erase is None else erase * key
    rows = chunks.query.reshape(*key.shape[:2], heads, *key.shape[2:])
    if erase is not None:
        rows = jnp.concatenate([rows, erase[:, :, None]], 2)
    (scores, rows, key), decay = _scaled(rows, chunks)
    if erase is not None:
        inverse = _inverse(jnp.tril(scores[:, :, -1], -1))
        value, erase = matmul(inverse, value), matmul(inverse, rows[:, :, -1])

    def step(
        state: Array, chunk: tuple[Array, Array, Array, Array | None]
    ) -> tuple[Array, tuple[Array, Array]]:
        decay, key, value, erase = chunk
        if erase is not None:
            value = value - matmul(erase, state)
        added = einsum("xsk,xsv->xkv", key, value)
        return decay[..., None] * state + added, (state, value)

    state, (before, value) = lax.scan(step, state, (decay, key, value, erase))
    scores = jnp.tril(scores[:, :, :heads], 0 if attends_to_itself else -1)
    y = einsum("jxrts,jxsv->jxrtv", scores, value)
    y = y + einsum("jxrtk,jxkv->jxrtv", rows[:, :, :heads], before)
    return state, lax.collapse(y, 2, 4)


def _block_of_two_keys(
    state: Array, chunks: MatrixOperands, *, heads: int, attends_to_itself: bool
) -> tuple[Array, Array]:
    """`_block` that erases along other keys than it writes: u_t = -r_t^T exp(g_t) S_(t-1) is
    written there, S_t = exp(g_t) S_(t-1) + (b_t * e_t) u_t^T + k_t v_t^T."""
    del attends_to_itself
    value, other = chunks.value, chunks.other
    assert chunks.erase is not None
    assert other is not None
    rows = chunks.query.reshape(*value.shape[:2], heads, *other.shape[2:])
    rows = jnp.concatenate([rows, other[:, :, None]], 2)

    def scaled(key: Array) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        of_key, decay = _scaled(rows, chunks._replace(key=key))
        return (of_key.scores, of_key.key), (of_key.rows, decay)

    keys = jnp.stack([chunks.erase * other, chunks.key])
    (scores, keys), (rows, decay) = jax.vmap(scaled, out_axes=(0, None))(keys)
    of_other, of_key = (jnp.tril(x, -1) for x in scores[:, :, :, -1])
    inverse = _inverse(of_other)
    read = matmul(inverse, matmul(of_key, value))
    erase = matmul(inverse, rows[:, :, -1])

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        decay, other, key, value, read, erase = chunk
        removed = -read - matmul(erase, state)
        added = einsum("xsk,xsv->xkv", key, value) + einsum("xsk,xsv->xkv", other, removed)
        return decay[..., None] * state + added, (state, removed)

    state, (before, removed) = lax.scan(step, state, (decay, *keys, value, read, erase))
    of_other, of_key = (jnp.tril(x[:, :, :heads]) for x in scores)
    y = einsum("jxrts,jxsv->jxrtv", of_key, value)
    y = y + einsum("jxrts,jxsv->jxrtv", of_other, removed)
    y = y + einsum("jxrtk,jxkv->jxrtv", rows[:, :, :heads], before)
    return state, lax.collapse(y, 2, 4)


@jax.custom_jvp
def _inverse(lower: Float[Array, "J X C C"]) -> Float[Array, "J X C C"]:
    """(I + A)^-1 for A below the diagonal, by (X + A)^-1 = X^-1 - X^-1 A X^-1 for diagonal blocks X
    of 1, 2, 4, ... rows, and A between two of them: forward substitution in matrix products."""
    size = lower.shape[-1]
    bits = np.arange((size - 1).bit_length())[:, None, None]
    t, s = np.indices((size, size))
    between = _as_numbers((t ^ s) >> bits == 1, lower)  # pairs across blocks of 2^bit rows

    def double(inverse: Array, between: Array) -> tuple[Array, None]:
        return inverse - matmul(inverse, matmul(lower * between, inverse)), None

    identity = varying_like(jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape), lower)
    if size == 1:  # `jax.disable_jit` refuses scans of no steps
        return identity
    return lax.scan(double, identity, between[:, None, None])[0]


@_inverse.defjvp
def _inverse_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    inverse = checkpoint_name(_inverse(*primals), INVERSE)
    return inverse, -matmul(inverse, matmul(*tangents, inverse))


class _Scaled(NamedTuple):
    """Operands of a chunk with decays G_t up to each token t.

    scores: sum_c rows_tc k_sc exp(G_tc - G_sc) `[J, X, R, C, C]` for s <= t.
    rows: rows exp(G) `[J, X, R, C, K]`.
    key: k exp(G_C - G) `[J, X, C, K]`.
    """

    scores: Array
    rows: Array
    key: Array


def _scaled(rows: Array, chunks: MatrixOperands) -> tuple[_Scaled, Array]:
    """Return the operands with decays, and exp(G_C) `[J, X, K or 1]`."""
    key, total = chunks.key, jnp.ones_like(chunks.key[..., 0, :1])
    if chunks.feature_decay is None:
        scores = einsum("jxrtk,jxsk->jxrts", rows, key)
    else:
        decay = _finite(chunks.feature_decay)
        from_start = jnp.exp(_sum_up_to(decay, chunks.head_decay))
        total, scaled = from_start[:, :, -1], rows * from_start[:, :, None]

        def by_differences() -> tuple[Array, Array]:
            relative = key / from_start
            return einsum("jxrtk,jxsk->jxrts", scaled, relative), relative * total[:, :, None]

        largest = -jnp.min(lax.stop_gradient(jnp.sum(decay, -2)), initial=0.0)
        way = first_safe(largest[None] - SMALL_DECAY)
        # Recomputed: otherwise each branch would also return zeros for the residuals of the other.
        ways = by_differences, partial(_by_levels, rows, key, decay)
        scores, key = lax.switch(way, [jax.checkpoint(x, prevent_cse=False) for x in ways])
        rows = scaled
    if chunks.head_decay is not None:
        decay = _finite(chunks.head_decay)
        from_start, between = jnp.exp(_sum_up_to(decay)), _between(decay)
        scores, rows = scores * between[:, :, None], rows * from_start[:, :, None]
        key = key * jnp.swapaxes(between[:, :, -1:], -1, -2)
        total = total * from_start[:, :, -1]
    return _Scaled(scores, rows, key), total


def _sum_up_to(
    decay: Float[Array, "J X C F"], head_decay: Float[Array, "J X C 1"] | None = None
) -> Float[Array, "J X C F"]:
    """Return G: the sums up to and including each token.

    They restart at a head decay of log 0, as at the start of a segment; otherwise cotangents of
    other segments would cancel only approximately.
    """
    if head_decay is None:
        if decay.shape[-1] == 1:  # a few numbers: a product compiles faster
            return einsum("ts,jxsf->jxtf", _up_to(decay), decay)
        return _sums(np.tri(decay.shape[-2], dtype=bool), decay)
    segments = jnp.cumsum(head_decay == -jnp.inf, -2)
    is_same = segments == jnp.swapaxes(segments, -1, -2)
    summed = jnp.where(is_same, _up_to(decay), 0)
    return einsum("jxts,jxsf->jxtf", summed, decay)


@jax.custom_jvp
def _between(decay: Float[Array, "J X C 1"]) -> Float[Array, "J X C C"]:
    """Return the exponential of the sum of the decays after token s up to token t; 1 for s >= t."""
    # Exact sums may be subtracted; the sums of the rests are small.
    sums = einsum("ts,pjxsf->pjxtf", _up_to(decay), split_exact(decay, QUANTUM))
    coarse, fine = sums - jnp.swapaxes(sums, -1, -2)
    return jnp.exp(jnp.tril(coarse + fine))


@_between.defjvp
def _between_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    """The sums of tangents, and of cotangents, are not differences of larger ones."""
    between, up_to = _between(*primals), _up_to(*primals)
    after = tangents[0] * (1 - up_to.T)[None, None]  # `[J, X, r, s]`, 0 unless r > s
    return between, between * einsum("tr,jxrs->jxts", up_to, after)


def _finite(decay: Array) -> Array:
    """Clip log decays, so that -inf is finite; the exponential is 0 in either case."""
    return jnp.maximum(decay, -256.0 if decay.dtype == jnp.float32 else -2048.0)


def _by_levels(rows: Array, key: Array, decay: Array) -> tuple[Array, Array]:
    """Return the scores, and k exp(G_C - G), with decays by feature of any size.

    The decay from s to t is the decay from s up to a boundary between them, times the decay from
    there to t. The boundary is the multiple of the largest possible power of two between them,
    which is unique. Each power, a level, is one product of rows and keys with their decays.
    """
    size = key.shape[-2]
    levels = (size - 1).bit_length() + 1
    level, t, s = np.indices((levels, size, size))
    half = (1 << level) >> 1  # tokens on each side of a boundary; 0 for a token and itself
    boundary = t // np.maximum(2 * half, 1) * 2 * half + half
    summed = ((boundary <= s) & (s <= t)) | ((t < s) & (s < boundary))
    after = (s > t)[0]
    summed = np.concatenate([(summed & (half > 0)).reshape(-1, size), after])
    decays, to_end = jnp.split(jnp.exp(_sums(summed, decay)), [levels * size], 2)
    decays = decays.reshape(*decays.shape[:2], levels, size, decays.shape[-1])
    scores = einsum(
        "jxrltk,jxlsk->jxrlts", rows[:, :, :, None] * decays[:, :, None], key[:, :, None] * decays
    )
    pairs = ((t ^ s) >> level == 0) & ((t ^ s) >= half) & (t >= s)
    return jnp.sum(jnp.where(pairs, scores, 0), 3), key * to_end


def _sums(summed: np.ndarray, decay: Float[Array, "J X C F"]) -> Float[Array, "J X I F"]:
    """Return the sums over the tokens that each row of `summed` `[I, C]` selects.

    The mask is repeated for a batched product: a shared one costs XLA's CPU backend several times
    the time of compilation.
    """
    mask = jnp.broadcast_to(_as_numbers(summed, decay), (*decay.shape[:2], *summed.shape))
    return einsum("jxis,jxsf->jxif", mask, decay)


def _up_to(decay: Float[Array, "*_ C F"]) -> Float[Array, "C C"]:
    return jnp.tri(decay.shape[-2], dtype=decay.dtype)


def _as_numbers(mask: np.ndarray, like: Array) -> Array:
    """Return a mask in the dtype of an array. Boolean constants take a quarter of the program's
    bytes."""
    return jnp.asarray(mask).astype(like.dtype)
