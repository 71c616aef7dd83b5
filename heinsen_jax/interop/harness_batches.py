"""Batches of the adapter to the lm-evaluation-harness: padded tokens, and predictions of them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.attention.cache import bucket
from heinsen_jax.generate.prompts import read
from heinsen_jax.generate.states import make_advance
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.typing import Array, Bool, Float, Integer

SMALLEST = 16
"""Padded lengths are multiples of it, so that few shapes are compiled."""
T = TypeVar("T")


@partial(jax.jit, static_argnames=("graph", "independent_rows"))
def read_contexts(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    independent_rows: bool,
    tokens: Integer[Array, "B T"],
    lengths: Integer[Array, "B"],
    state: LanguageModelState,
) -> LanguageModelState:
    """The states after contexts of these lengths."""
    return read(make_advance(graph, parameters, independent_rows), tokens, lengths, state)[1]


@partial(jax.jit, static_argnames=("graph", "independent_rows", "num_tokens"))
def predict(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    independent_rows: bool,
    num_tokens: int,
    tokens: Integer[Array, "B T"],
    targets: Integer[Array, "B T"],
    state: LanguageModelState,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"], LanguageModelState]:
    """log p of the targets after the tokens and states, whether each is the likeliest of the first
    `num_tokens`, and the states after the tokens."""
    features, state = make_advance(graph, parameters, independent_rows)(tokens, state)
    readout = nnx.merge(graph, parameters).readout

    def one(chunk: tuple[Array, Array]) -> tuple[Array, Array]:
        features, targets = chunk
        logits = readout(features)
        log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], -1)[..., 0]
        return log_p, jnp.argmax(logits[..., :num_tokens], -1) == targets

    by_position = jnp.moveaxis(features, 1, 0), targets.T  # logits of one position at a time
    log_p, is_likeliest = jax.lax.map(one, by_position, batch_size=SMALLEST)
    return log_p.T, is_likeliest.T, state


def windows(
    context: list[int], continuation: list[int], max_length: int | None
) -> list[tuple[list[int], list[int]]]:
    """The context and continuation, cut on the left so that at most `max_length` tokens are given.

    A continuation of more tokens than that is split: each part follows the tokens before it.
    """
    if max_length is None:
        return [(context, continuation)]
    tokens, parts = context + continuation, []
    for start in range(len(context), len(tokens), max_length):
        end = min(start + max_length, len(tokens))
        parts.append((tokens[max(0, end - max_length - 1) : start], tokens[start:end]))
    return parts


def batches(number: int, items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Iterate over batches of up to `number` items."""
    return (items[start : start + number] for start in range(0, len(items), number))


def padded(rows: list[list[int]], number: int, length: int = SMALLEST) -> Array:
    """Pad to `[number, T]` with zeros, where T has few values."""
    longest = max(map(len, rows), default=0)
    tokens = np.zeros((number, max(length, bucket(longest, SMALLEST))), np.int32)
    for row, given in zip(tokens, rows, strict=False):
        row[: len(given)] = given
    return jnp.asarray(tokens)


def padded_row(numbers: list[int], length: int) -> Array:
    """Pad to `length` with zeros."""
    return jnp.asarray([*numbers, *[0] * (length - len(numbers))], jnp.int32)
