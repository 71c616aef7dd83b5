"""Packed documents: the model's results for each are those of that document alone."""

import itertools
from collections.abc import Callable
from functools import partial

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
POSITIONS = {"positions": "learned", "max_length": 40}


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


@few_or_nightly(ABLE, few=["log", "fox"])
def test_documents_are_independent(name):
    check(configured(name, num_layers=1))


BIDIRECTIONAL = [name for name in ABLE if CAPABILITIES[name].bidirectional]


@pytest.mark.nightly
@few_or_nightly(BIDIRECTIONAL, few=["gqa"])
def test_documents_are_independent_in_both_directions(name):
    check(configured(name, num_layers=1, is_causal=False, block="standard"))


VARIANTS = {
    "recurrence": ("log", {}, {}),
    "recurrence and convolution": ("linear", {}, {"convolution_size": 3}),
    "learned positions": ("linear", {}, POSITIONS | {"convolution_size": 3}),
    "decay block": ("log", {"implementation": "chunked"}, {"block": "decay"}),
    "decay by feature": ("log", {"implementation": "chunked", "decay": "feature"}, {}),
    "rotary": ("softmax", {"positions": "rotary"}, {"positions": "none"}),
    "alibi": ("gqa", {"positions": "alibi"}, {"positions": "none"}),
    "local blocks": ("block_sparse", {"pattern": "local"}, POSITIONS),
}


@few_or_nightly([*VARIANTS], few=["decay block"])
def test_positions_and_convolutions_are_those_of_each_document(name):
    mechanism, options, fields = VARIANTS[name]
    sizes = {"num_layers": 2, "block": "standard", "model_dim": 16}
    check(configured(mechanism, options=options, **sizes | fields))


@pytest.mark.nightly
def test_a_stream_continues_the_first_segment_and_returns_the_last():
    config = configured("log", num_layers=1, convolution_size=3)
    graph, parameters = nnx.split(random_model(config))

    @jax.jit
    def apply(tokens, segment_ids, state):
        model = nnx.merge(graph, parameters)
        return model(tokens, segment_ids=segment_ids, state=state, return_state=True)

    start = random_model(config).init_state((2,))
    whole, end = apply(TOKENS, IDS, start)
    parts, state = [], start
    for chunk in (slice(0, 11), slice(11, 22), slice(22, 33)):  # all of them begin inside segments
        y, state = apply(TOKENS[:, chunk], IDS[:, chunk], state)
        parts.append(y)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, atol=1e-5)
    _, alone = jax.jit(partial(random_model(config), return_state=True))(TOKENS[:, BORDERS[2] :])
    for have, again, want in zip(*map(jax.tree.leaves, (end, state, alone)), strict=True):
        np.testing.assert_allclose(have, want, atol=1e-5)
        np.testing.assert_allclose(again, want, atol=1e-5)


@pytest.mark.usefixtures("unchecked")  # for ids of a wrong shape
@pytest.mark.parametrize(
    ("name", "fields", "keywords", "error", "message"),
    [
        ("longformer", {}, {}, NotImplementedError, "no capability 'segments'"),
        ("softmax", {}, {"return_state": True}, NotImplementedError, "unsupported with a state"),
        (
            "log",
            POSITIONS,
            {"return_state": True},
            NotImplementedError,
            "LearnedPositions: .* state",
        ),
        ("log", {}, {"segment_ids": IDS[:, 1:]}, ValueError, r"shape \(2, 33\), got \(2, 32\)"),
    ],
)
def test_unsupported_calls_are_refused(name, fields, keywords, error, message):
    model = random_model(configured(name, num_layers=1, **fields))
    with pytest.raises(error, match=message):
        model(TOKENS, **{"segment_ids": IDS, **keywords})
