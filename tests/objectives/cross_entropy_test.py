"""Cross-entropy in chunks of tokens equals that of all tokens, with its gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.models.readout import Readout
from heinsen_jax.objectives.cross_entropy import cross_entropy, distilled_losses, token_losses

VOCABULARY, WIDTH = 37, 8


def draw(rows, length, seed, bias=False):
    keys = jax.random.split(jax.random.key(seed), 5)
    embedding = jax.random.normal(keys[0], (VOCABULARY, WIDTH))
    readout = Readout(embedding, jax.random.normal(keys[1], (VOCABULARY,)) if bias else None, 0.5)
    features = jax.random.normal(keys[2], (rows, length, WIDTH))
    targets = jax.random.randint(keys[3], (rows, length), 0, VOCABULARY)
    return readout, features, targets, jax.random.bernoulli(keys[4], 0.7, (rows, length))


def in_one_chunk(readout, features, targets, loss_mask, z_loss=0.0):
    """Definition, with all logits in memory."""
    logits = features @ readout.embedding.T
    logits = (logits if readout.bias is None else logits + readout.bias[None, None]) * readout.scale
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    z = jnp.log(jnp.sum(jnp.exp(logits), -1))
    return jnp.sum((losses + z_loss * z**2) * loss_mask), jnp.sum(
        (jnp.argmax(logits, -1) == targets) & loss_mask
    )


@partial(jax.jit, static_argnames=("function", "max_logits", "z_loss"))
def measure(function, readout, features, targets, loss_mask, **options):
    """Return the loss, the number of correct predictions, and the gradients of the loss."""

    def loss(readout, features):
        total, correct = function(readout, features, targets, loss_mask, **options)
        return total, correct

    return jax.value_and_grad(loss, (0, 1), has_aux=True)(readout, features)


def check(arrays, max_logits, **options):
    (want, correct), gradients = measure(in_one_chunk, *arrays, **options)
    have = measure(cross_entropy, *arrays, max_logits=max_logits, **options)
    np.testing.assert_allclose(have[0][0], want, rtol=1e-5, atol=1e-5)
    assert have[0][1] == correct
    for a, b in zip(jax.tree.leaves(have[1]), jax.tree.leaves(gradients), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [5, 1000])
def test_z_loss(chunk_tokens):
    check(draw(3, 23, 1), VOCABULARY * chunk_tokens, z_loss=0.1)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk_tokens", [1, 3 * 5, 3 * 23], ids="{} tokens".format)
def test_chunks_of_one_token_of_some_and_of_all(chunk_tokens, bias):
    """Five tokens of a row do not divide its 23."""
    check(draw(3, 23, 0, bias), chunk_tokens * VOCABULARY)


@pytest.mark.parametrize("chunk_tokens", [3 * 5, 3 * 23], ids="{} tokens".format)
def test_losses_of_tokens_add_up(chunk_tokens):
    readout, features, targets, _ = draw(3, 23, 0)
    function = partial(token_losses, max_logits=chunk_tokens * VOCABULARY)
    losses, correct = jax.jit(function)(readout, features, targets)
    for place in (0, 7, 22):
        only = jnp.broadcast_to(jnp.arange(23) == place, (3, 23))
        total, right = in_one_chunk(readout, features, targets, only)
        np.testing.assert_allclose(losses[:, place].sum(), total, rtol=1e-5)
        assert correct[:, place].sum() == right


@pytest.mark.nightly
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 23),
    max_logits=st.integers(1, 3 * 23 * VOCABULARY),
    bias=st.booleans(),
    seed=st.integers(0, 1000),
)
@settings(max_examples=15, deadline=None)
def test_chunks_of_any_size(rows, length, max_logits, bias, seed):
    check(draw(rows, length, seed, bias), max_logits)


@pytest.mark.parametrize("is_distilled", [False, True])
def test_gradients_of_bfloat16_weights_do_not_depend_on_the_number_of_chunks(is_distilled):
    """Cotangents of chunks are summed in float32."""
    readout, features, targets, loss_mask = draw(4, 256, 0)
    features = jnp.abs(features)  # contributions of the same sign
    half = jnp.asarray(readout.embedding, jnp.bfloat16)

    def loss(embedding, number):
        ours, limit = Readout(embedding, dtype="bfloat16"), 4 * 256 * VOCABULARY // number
        if is_distilled:
            theirs = ours, features[:, ::-1]
            options = {"divergence_weight": 0.5, "max_logits": 2 * limit}
            return jnp.sum(distilled_losses(ours, features, *theirs, targets, **options))
        return cross_entropy(ours, features, targets, loss_mask, max_logits=limit)[0]

    few, many = (np.float32(jax.grad(loss)(half, number)) for number in (1, 256))
    assert np.linalg.norm(many - few) < 3e-3 * np.linalg.norm(few)


@pytest.mark.usefixtures("unchecked")  # for shapes in place of arrays
def test_logits_of_a_batch_are_never_stored():
    """For 64 x 1024 tokens and GPT-2's vocabulary they would need 13 GB."""
    sizes = LanguageModelConfig()
    readout = Readout(jax.ShapeDtypeStruct((sizes.vocab_size, sizes.model_dim), jnp.float32))
    rows, length = 64, 1024
    tokens = [
        jax.ShapeDtypeStruct((rows, length), dtype) for dtype in (jnp.int32, jnp.dtype("bool"))
    ]
    features = jax.ShapeDtypeStruct((rows, length, sizes.model_dim), jnp.float32)
    loss = jax.jit(jax.grad(lambda *x: cross_entropy(*x)[0], (0, 1)))
    memory = loss.lower(readout, features, *tokens).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 5e9 < 4 * rows * length * sizes.vocab_size


@pytest.mark.parametrize("order", ["value", "gradient"])
def test_half_precision_is_multiplied_as_such_and_summed_in_float32(order):
    readout, features, targets, loss_mask = draw(2, 16, 0)
    half = Readout(readout.embedding, dtype="bfloat16")

    def loss(readout, features):
        return cross_entropy(readout, features, targets, loss_mask)[0]

    function = loss if order == "value" else jax.grad(loss, (0, 1))
    text = str(jax.jit(function).lower(half, features).as_text())
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) == (1 if order == "value" else 3)
    for line in products:
        factors, result = line.split(" : ")[1].split(" -> ")
        assert factors.count("bf16") == 2
        assert "f32" in result
    want = function(Readout(readout.embedding), features)
    for a, b in zip(jax.tree.leaves(function(half, features)), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-2 * np.abs(b).max())
