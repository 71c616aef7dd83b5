"""Packed documents: the model's results for each are those of that document alone."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from tests.models.mechanisms_test import configured, few_or_nightly
from tests.models.small import random_model

CAPABILITIES = {name: attention.mechanism(name).capabilities for name in attention.names()}
ABLE = [name for name, can in CAPABILITIES.items() if can.segments]
BORDERS = [0, 7, 18, 33]  # the first document began before the row
TOKENS = np.random.default_rng(0).integers(0, 17, (2, BORDERS[-1])).astype(np.int32)
IDS = np.searchsorted(BORDERS, np.arange(BORDERS[-1]), side="right").astype(np.int32)
IDS = np.stack([IDS, IDS[-1] - IDS])  # ids may be any integers
POSITIONS: dict[str, dict[str, Any]] = {
    "recurrence": {},
    "learned": {"positions": "learned", "max_length": 40},
    "none": {"positions": "none"},
}


class Given(nnx.Module):
    """Replacement of the embedding: vectors to differentiate by, and the same readout."""

    def __init__(self, vectors: jax.Array, embedding: nnx.Param):
        self.vectors, self.embedding = nnx.data(vectors), embedding

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return self.vectors


def of_vectors(model: LanguageModel, tokens: np.ndarray) -> tuple[Callable, jax.Array]:
    """Return the logits as a function of the embedded tokens and segments; and those vectors."""
    graph, parameters = nnx.split(model)

    def logits(vectors: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        model = nnx.merge(graph, parameters)
        model.embed = Given(vectors, model.embed.embedding)
        return model(jnp.asarray(tokens), segment_ids=segment_ids)

    return logits, model.embed(jnp.asarray(tokens))


def check(config: LanguageModelConfig) -> None:
    """Compare with each document alone; no document's results depend on another's tokens."""
    logits, vectors = of_vectors(random_model(config), TOKENS)

    @jax.jit
    def packed(vectors, cotangent):
        y, pullback = jax.vjp(partial(logits, segment_ids=jnp.asarray(IDS)), vectors)
        return y, *pullback(cotangent)

    y, _ = packed(vectors, jnp.zeros((*TOKENS.shape, 17)))
    alone = jax.jit(partial(logits, segment_ids=None)) if config.is_causal else None
    for start, stop in itertools.pairwise(BORDERS):
        inside = np.zeros(BORDERS[-1], bool)
        inside[start:stop] = True
        weights = np.where(inside[:, None], np.cos(np.arange(17)), 0)
        _, gradient = packed(vectors, jnp.broadcast_to(jnp.asarray(weights, y.dtype), y.shape))
        assert np.all(np.isfinite(gradient))
        assert np.all(np.any(gradient[:, start:stop] != 0, -1))
        np.testing.assert_array_equal(gradient[:, ~inside], 0)
        if alone is not None:  # the document first, before any tokens, so that one length suffices
            expected = alone(jnp.roll(vectors, -start, 1))[:, : stop - start]
        else:
            model, tokens = random_model(config), TOKENS[:, start:stop]
            expected = jax.jit(lambda model, tokens: model(tokens))(model, tokens)
        np.testing.assert_allclose(y[:, start:stop], expected, atol=1e-5 * np.max(np.abs(y)))


@few_or_nightly(ABLE, few=["log", "softmax", "gated_deltanet", "additive"])
def test_documents_are_independent(name):
    check(configured(name, num_layers=1))


@few_or_nightly(["log", "block_sparse", "retnet", "gqa"], few=["log"])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("convolution_size", [None, 3])
def test_with_each_position_encoding_and_convolutions(name, positions, convolution_size):
    options = {"block_sparse": {"pattern": "local"}, "gqa": {"positions": "alibi"}}
    fields = POSITIONS[positions] | {"convolution_size": convolution_size, "block": "standard"}
    check(configured(name, options=options.get(name), num_layers=2, **fields))
