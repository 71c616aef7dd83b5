"""One update, and one evaluation batch, as compiled functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from heinsen_jax.training.state import TrainState
from heinsen_jax.typing import Array

Metrics = dict[str, Array]


def token_losses(graph: nnx.GraphDef, parameters: Any, tokens: Array) -> Array:
    """Cross-entropy in nats of each next token: tokens `[B, T + 1]` -> `[B, T]`."""
    logits = nnx.merge(graph, parameters)(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def make_train_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    accumulation_steps: int,
    out_shardings: TrainState,
) -> Callable[[TrainState, Array], tuple[TrainState, Metrics]]:
    """The compiled update. Its input state is donated.

    With accumulation the batch is cut into `accumulation_steps` parts, whose gradients are summed
    one after another: the update is that of the whole batch, in the memory of one part.
    """

    def mean_loss(parameters: Any, tokens: Array) -> Array:
        return jnp.mean(token_losses(graph, parameters, tokens))

    def gradient(parameters: Any, tokens: Array) -> tuple[Array, Any]:
        if accumulation_steps == 1:
            return jax.value_and_grad(mean_loss)(parameters, tokens)
        # Rows stay on their device: each part takes every accumulation_steps-th row.
        parts = tokens.reshape(-1, accumulation_steps, tokens.shape[-1]).swapaxes(0, 1)

        def add(total: Any, part: Array) -> tuple[Any, None]:
            return jax.tree.map(
                jnp.add, total, jax.value_and_grad(mean_loss)(parameters, part)
            ), None

        shapes = jax.eval_shape(jax.value_and_grad(mean_loss), parameters, parts[0])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = lax.scan(add, zeros, parts)
        return jax.tree.map(lambda x: x / accumulation_steps, total)

    def train_step(state: TrainState, tokens: Array) -> tuple[TrainState, Metrics]:
        loss, gradients = gradient(state.parameters, tokens)
        with jax.named_scope("optimizer"):
            updates, optimizer_state = optimizer.update(
                gradients, state.optimizer, state.parameters
            )
            parameters = optax.apply_updates(state.parameters, updates)
            metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        return TrainState(state.step + 1, parameters, optimizer_state), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=(out_shardings, None))


def make_evaluation_step(graph: nnx.GraphDef) -> Callable[[Any, Array, Array], Array]:
    """(parameters, tokens [B, T+1], mask [B, T]) -> sum of the masked tokens' losses, compiled."""

    @jax.jit
    def evaluation_step(parameters: Any, tokens: Array, mask: Array) -> Array:
        return jnp.sum(token_losses(graph, parameters, tokens) * mask)

    return evaluation_step
