"""Parts of sequences, each with programs of its own: few heads would leave most of a GPU idle.

The state of each part's tokens alone is computed by XLA, and so are the states before all parts
from these. The kernels then treat parts as sequences.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from heinsen_jax.ops.linear_recurrence import decay_to_end
from heinsen_jax.ops.log_attention.inputs import Averages, Inputs
from heinsen_jax.ops.log_attention.mosaic.operands import CHUNK
from heinsen_jax.ops.log_attention.state import decayed_averages, merge_averages
from heinsen_jax.ops.numerics import softmax
from heinsen_jax.typing import Array, Float

PROGRAMS = 128
"""Number of programs that occupy a GPU: one of the Hopper generation has up to 132
multiprocessors."""
LEAST_CHUNKS = 8
"""Least number of chunks of a part."""


def number_of_parts(inputs: Inputs) -> int:
    """Number of parts of each sequence, so that all heads of all parts are about `PROGRAMS`."""
    batch, length, groups, heads, _ = inputs.query.shape
    return max(1, min(PROGRAMS // (batch * groups * heads), length // (CHUNK * LEAST_CHUNKS)))


class _Part(NamedTuple):
    """The tokens of a part.

    Attributes:
      total: `[..., G, K]` or `[..., G, 1]`, the sum of their decays.
      state: their averages, in linear space.
    """

    total: Float[Array, "*B G _"]
    state: Averages

    def then(self, later: "_Part") -> "_Part":
        before = decayed_averages(self.state, later.total, is_log=False)
        return _Part(self.total + later.total, merge_averages(before, later.state, is_log=False))


def in_parts(
    inputs: Inputs, state: Averages, parts: int, *, is_log: bool
) -> tuple[Inputs, Averages]:
    """The parts as sequences, `[B P, T / P, ...]`, and the states before them.

    Args:
      inputs: tokens, whose number is a multiple of `parts`.
      state: averages before all tokens, in linear space, as all states here.
      parts: number of parts P.
      is_log: whether values are log-values.
    """
    if parts == 1:
        return inputs, state

    def apart(x: Array) -> Array:
        return x.reshape(x.shape[0] * parts, -1, *x.shape[2:])

    def shifted(first: Array, x: Array) -> Array:
        x = x.reshape(-1, parts, *x.shape[1:])
        return jnp.concatenate([first[:, None], x[:, :-1]], 1)

    tokens = jax.tree.map(apart, inputs)
    part = _part(tokens, is_log)
    first = _Part(jnp.zeros_like(part.total[::parts]), state)
    before = lax.associative_scan(_Part.then, jax.tree.map(shifted, first, part), axis=1)
    return tokens, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), before.state)


def _part(tokens: Inputs, is_log: bool) -> _Part:
    key, value = tokens.key.astype(jnp.float32), tokens.value.astype(jnp.float32)
    decay, total = tokens.decay_and_starts, jnp.zeros_like(key[:, 0, :, :1])
    if decay is not None:
        decay = decay.astype(jnp.float32)
        key, total = key + decay_to_end(decay, 1), jnp.sum(decay, 1)
    key_softmax = softmax((key,), 1)
    factors = *key_softmax.weights, jnp.exp(value) if is_log else value
    shares, value = (x.astype(tokens.key.dtype) for x in factors)
    sums = jnp.einsum(
        "btgk,btgv->bgkv", shares, value, precision="highest", preferred_element_type=jnp.float32
    )
    return _Part(total, Averages(key_softmax.log_z, sums))
