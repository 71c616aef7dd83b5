"""Cross-entropy without materializing all logits, which would be 100 GB for half a million tokens
and a vocabulary of 50,000."""

import math
from collections.abc import Callable
from functools import partial
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax import lax

from heinsen_jax.attention.parameters import in_float32
from heinsen_jax.ops.layout import astype_like
from heinsen_jax.sharding import current_mesh
from heinsen_jax.typing import Array, Bool, Float, Integer

Tree = TypeVar("Tree")

MAX_LOGITS = 2**27  # on each device: 512 MiB of float32


Readout: TypeAlias = Callable[[Array], Array]
Sums: TypeAlias = tuple[Float[Array, ""], Integer[Array, ""]]
Chunk: TypeAlias = tuple[Float[Array, "B T D"], Integer[Array, "B T"], Bool[Array, "B T"]]


def cross_entropy(
    readout: Readout,
    features: Float[Array, "B T D"],
    targets: Integer[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
    *,
    z_loss: float = 0.0,
    max_logits: int = MAX_LOGITS,
) -> Sums:
    """Sum of the losses over tokens that count, in nats, and number of correct predictions.

        loss = sum_t loss_mask_t (z_t - logits_t,target + z_loss z_t^2)
        z_t = LSE_v(logits_tv),    logits = readout(features)

    Tokens are processed in chunks, and the gradient of each chunk is formed with its logits, which
    are computed once and not stored.

    Args:
      readout: a callable pytree that maps features `[B, T, D]` to logits `[B, T, V]`.
      features: `[B, T, D]`.
      targets: `[B, T]`, token ids.
      loss_mask: `[B, T]`, the predictions that count.
      z_loss: weight of the squares of z, which keep z close to 0.
      max_logits: number of logits in memory per device; at least one token per row is processed.

    References:
      Chowdhery et al., 2022, PaLM, arXiv:2204.02311, section 5 (z-loss).
    """
    number = _number_of_chunks(readout, features, max_logits)
    return _in_chunks(number, z_loss, readout, features, targets, loss_mask)


def token_losses(
    readout: Readout,
    features: Float[Array, "B T D"],
    targets: Integer[Array, "B T"],
    *,
    max_logits: int = MAX_LOGITS,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Loss of each token in nats, and whether the most likely token is correct; for evaluation.

    Args:
      readout: as for `cross_entropy`.
      features: `[B, T, D]`.
      targets: `[B, T]`, token ids.
      max_logits: as for `cross_entropy`.
    """
    tokens = features, targets
    chunks = jax.tree.map(
        partial(_chunks, _number_of_chunks(readout, features, max_logits)), tokens
    )
    results = lax.map(lambda chunk: _token_losses(0.0, readout, *chunk), chunks)
    return jax.tree.map(lambda x: _together(x)[:, : targets.shape[1]], results)


def distilled_losses(
    readout: Readout,
    features: Float[Array, "B T D"],
    teacher_readout: Readout,
    teacher_features: Float[Array, "B T D"],
    targets: Integer[Array, "B T"],
    *,
    divergence_weight: float,
    max_logits: int = MAX_LOGITS,
) -> Float[Array, "B T"]:
    """Loss of each token of a model that imitates a teacher, in nats.

        loss_t = (1 - w) (-log p_t,target) + w sum_v q_tv (log q_tv - log p_tv)
        p = softmax(readout(features)),    q = softmax(teacher_readout(teacher_features))

    Args:
      readout: as for `cross_entropy`.
      features: `[B, T, D]`.
      teacher_readout: the teacher's readout, which has no gradient.
      teacher_features: `[B, T, D]`.
      targets: `[B, T]`, token ids.
      divergence_weight: w, of the divergence from the teacher.
      max_logits: as for `cross_entropy`.

    References:
      Hinton, Vinyals, Dean, 2015, Distilling the Knowledge in a Neural Network, arXiv:1503.02531.
    """

    promoted = jax.tree.map(in_float32, readout)  # for the sum of the cotangents of chunks

    @jax.checkpoint
    def chunk_losses(
        chunk: tuple[Float[Array, "B T D"], Float[Array, "B T D"], Integer[Array, "B T"]],
    ) -> Float[Array, "B T"]:
        ours, theirs, chosen = chunk
        log_p = jax.nn.log_softmax(astype_like(promoted, readout)(ours))
        log_q = jax.nn.log_softmax(lax.stop_gradient(teacher_readout(theirs)))
        divergence = jnp.sum(jnp.exp(log_q) * (log_q - log_p), -1)
        log_chosen = jnp.take_along_axis(log_p, chosen[..., None], -1)[..., 0]
        return divergence_weight * divergence - (1 - divergence_weight) * log_chosen

    number = _number_of_chunks(readout, features, max_logits // 2)
    tokens = features, lax.stop_gradient(teacher_features), targets
    losses = lax.map(chunk_losses, jax.tree.map(partial(_chunks, number), tokens))
    return _together(losses)[:, : targets.shape[1]]


def _number_of_chunks(readout: Readout, features: Float[Array, "B T D"], max_logits: int) -> int:
    vocabulary = jax.eval_shape(readout, features[:, :1]).shape[-1]
    mesh = current_mesh()
    limit = max_logits * (1 if mesh is None else mesh.size)
    rows, length, _ = features.shape
    return min(math.ceil(rows * length * vocabulary / limit), length)


def _token_losses(
    z_loss: float,
    readout: Readout,
    features: Float[Array, "B T D"],
    targets: Integer[Array, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    logits = readout(features)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    if z_loss:
        losses = losses + z_loss * jax.nn.logsumexp(logits, -1) ** 2
    return losses, jnp.argmax(logits, -1) == targets


def _sums(
    z_loss: float,
    readout: Readout,
    features: Float[Array, "B T D"],
    targets: Integer[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
) -> Sums:
    losses, correct = _token_losses(z_loss, readout, features, targets)
    return jnp.sum(losses, where=loss_mask), jnp.sum(correct & loss_mask)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_chunks(
    number: int,
    z_loss: float,
    readout: Readout,
    features: Float[Array, "B T D"],
    targets: Integer[Array, "B T"],
    loss_mask: Bool[Array, "B T"],
) -> Sums:
    tokens = features, targets, loss_mask
    if number == 1:
        return _sums(z_loss, readout, *tokens)

    def add(sums: Sums, chunk: Chunk) -> tuple[Sums, None]:
        return jax.tree.map(jnp.add, sums, _sums(z_loss, readout, *chunk)), None

    chunks = jax.tree.map(partial(_chunks, number), tokens)
    return lax.scan(add, _zeros(jax.eval_shape(partial(_sums, z_loss), readout, *tokens)), chunks)[
        0
    ]


def _forward(number, z_loss, readout, features, targets, loss_mask):
    tokens = features, targets, loss_mask
    gradients = jax.value_and_grad(partial(_sums, z_loss), argnums=(0, 1), has_aux=True)
    if number == 1:
        sums, saved = gradients(readout, *tokens)
        return sums, saved

    def add(carry: tuple[Sums, Readout], chunk: Chunk) -> tuple[tuple[Sums, Readout], Array]:
        sums, (d_readout, d_features) = gradients(readout, *chunk)
        d_readout = jax.tree.map(in_float32, d_readout)
        return jax.tree.map(jnp.add, carry, (sums, d_readout)), d_features

    chunks = jax.tree.map(partial(_chunks, number), tokens)
    sums = jax.eval_shape(partial(_sums, z_loss), readout, *tokens)
    zeros = _zeros(sums), jax.tree.map(in_float32, _zeros(readout))
    (sums, d_readout), d_features = lax.scan(add, zeros, chunks)
    return sums, (astype_like(d_readout, readout), _together(d_features)[:, : targets.shape[1]])


def _backward(number, z_loss, saved, cotangents):
    del number, z_loss
    scale, _ = cotangents
    d_readout, d_features = jax.tree.map(lambda x: (scale * x).astype(x.dtype), saved)
    return d_readout, d_features, None, None


_in_chunks.defvjp(_forward, _backward)


def _chunks(number: int, x: Array) -> Array:
    """`[B, T, ...]` -> `[number, B, T / number, ...]`, padded with zeros, which do not count. Every
    number-th token is in one chunk, so that tokens stay on their device."""
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % number), *[(0, 0)] * (x.ndim - 2)])
    return jnp.moveaxis(x.reshape(x.shape[0], -1, number, *x.shape[2:]), 2, 0)


def _together(chunks: Array) -> Array:
    """The inverse, padding included."""
    x = jnp.moveaxis(chunks, 0, 2)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _zeros(shapes: Tree) -> Tree:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
