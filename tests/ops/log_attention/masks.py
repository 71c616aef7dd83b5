"""Masks, inputs, and an oracle of attention under a mask: term by term, in NumPy's float64."""

from typing import NamedTuple

import numpy as np
from flax import nnx

BATCH, LENGTH, HEADS, DEPTH = 2, 19, 4, 5
FULL = BATCH, HEADS, LENGTH, LENGTH
TOKENS = np.ones((BATCH, LENGTH))
INF = np.inf


class Arrays(NamedTuple):
    query: np.ndarray
    key: np.ndarray
    value: np.ndarray


def arrays(std: float = 1.0, groups: int = HEADS, length: int = LENGTH, seed: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    query, key = (
        std * rng.standard_normal((BATCH, length, n, DEPTH), np.float32) for n in (HEADS, groups)
    )
    return Arrays(query, key, rng.standard_normal((BATCH, length, groups, 3), np.float32))


def cotangent_of(x: Arrays) -> np.ndarray:
    shape = (*x.query.shape[:-1], x.value.shape[-1])
    return np.random.default_rng(9).standard_normal(shape, np.float32)


def average(x: Arrays, mask: np.ndarray, d_y: np.ndarray | None = None):
    """Eq. (1) over visible tokens, and its gradients, term by term in float64."""
    query, key, value = (a.astype(np.float64) for a in x)
    d_y = np.zeros((*query.shape[:-1], value.shape[-1])) if d_y is None else d_y
    mask = np.broadcast_to(mask, (BATCH, HEADS, query.shape[1], key.shape[1])).astype(bool)
    y, grads = np.zeros(d_y.shape), Arrays(*(np.zeros(a.shape) for a in (query, key, value)))
    for b, n, t in np.ndindex(BATCH, HEADS, query.shape[1]):
        g, indices = n // (HEADS // key.shape[2]), np.flatnonzero(mask[b, n, t])
        terms = query[b, t, n] + key[b, indices, g]
        largest = terms.max(initial=-INF)
        if largest == -INF:
            continue
        shares = np.exp(terms - largest) / np.exp(terms - largest).sum()  # share of each term
        weights = shares.sum(1)
        y[b, t, n] = weights @ value[b, indices, g]
        difference = (value[b, indices, g] - y[b, t, n]) @ d_y[b, t, n]
        grads.query[b, t, n] += difference @ shares
        grads.key[b, indices, g] += difference[:, None] * shares
        grads.value[b, indices, g] += weights[:, None] * d_y[b, t, n]
    return y, grads


CAUSAL = np.asarray(nnx.make_causal_mask(TOKENS))
LENGTHS = np.arange(LENGTH) < np.array([[11], [16]])
VALID = np.asarray(nnx.make_attention_mask(LENGTHS, LENGTHS))
DOCUMENT = np.cumsum(np.arange(LENGTH) % 7 == 6)[None].repeat(BATCH, 0)
SAME = np.asarray(nnx.make_attention_mask(DOCUMENT, DOCUMENT, np.equal))
RANDOM = np.random.default_rng(1).uniform(size=FULL) < 0.3
MASKS = {
    "causal": CAUSAL,
    "padding": VALID,
    "padding of keys": np.broadcast_to(LENGTHS[:, None, None], (BATCH, 1, 1, LENGTH)),
    "padding of queries": np.swapaxes(LENGTHS[:, None, None], -1, -2),
    "causal, padding": np.asarray(nnx.combine_masks(CAUSAL, VALID)),
    "causal, padding on the left": CAUSAL * LENGTHS[:, None, None, ::-1],
    "causal, documents": np.asarray(nnx.combine_masks(CAUSAL, SAME, dtype=bool)),
    "documents": SAME,
    "of each head": RANDOM,
    "of all heads": RANDOM[:, :1],
    "of all sequences": RANDOM[0],
    "of keys, of each head": RANDOM[:, :, :1],
    "of queries and keys": RANDOM[0, 0],
    "everything": np.ones(FULL),
    "nothing": np.zeros(FULL),
    "strictly earlier": np.tri(LENGTH, k=-1),
}
