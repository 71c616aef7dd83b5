"""One update, and one evaluation batch, as compiled functions."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from heinsen_jax.training.objective import Objective, next_token
from heinsen_jax.training.state import TrainState
from heinsen_jax.typing import Array

Metrics = dict[str, Array]


def make_train_step(
    graph: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    *,
    accumulation_steps: int,
    out_shardings: TrainState | None,
    objective: Objective = next_token,
    seed: int = 0,
    skip_above: float | None = None,
) -> Any:
    """The update under `jax.jit`, (state, tokens) -> (state, metrics). Its input state is donated.

    What the objective draws at random is a function of the seed and the step. An update that
    `Guard` refuses changes neither parameters nor the optimizer's state.

    With accumulation the batch is cut into `accumulation_steps` parts, whose gradients are summed
    one after another: the update is that of the whole batch, in the memory of one part.
    """

    @jax.value_and_grad
    def of_part(parameters: Any, tokens: Array, key: Array) -> Array:
        there = jnp.ones(tokens[:, 1:].shape, bool)
        losses, counted = objective(nnx.merge(graph, parameters), tokens, there, key)
        return jnp.sum(losses * counted) / jnp.sum(counted)

    def gradient(parameters: Any, tokens: Array, key: Array) -> tuple[Array, Any]:
        if accumulation_steps == 1:
            return of_part(parameters, tokens, key)
        # Rows stay on their device: each part takes every accumulation_steps-th row.
        parts = tokens.reshape(-1, accumulation_steps, tokens.shape[-1]).swapaxes(0, 1)

        keys = jax.random.split(key, accumulation_steps)

        def add(total: Any, part: tuple[Array, Array]) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_part(parameters, *part)), None

        shapes = jax.eval_shape(of_part, parameters, parts[0], key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        total, _ = lax.scan(add, zeros, (parts, keys))
        return jax.tree.map(lambda x: x / accumulation_steps, total)

    def train_step(state: TrainState, tokens: Array) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        loss, gradients = gradient(state.parameters, tokens, key)
        with jax.named_scope("optimizer"):
            updates, optimizer_state = optimizer.update(
                gradients, state.optimizer, state.parameters
            )
            is_good, guard = state.guard.judge(loss, gradients, updates, skip_above)
            updated = optax.apply_updates(state.parameters, updates), optimizer_state
            parameters, optimizer_state = jax.tree.map(
                lambda new, old: jnp.where(is_good, new, old),
                updated,
                (state.parameters, state.optimizer),
            )
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        metrics |= {"skipped": guard.skipped, "skipped_in_a_row": guard.in_a_row}
        return TrainState(state.step + 1, parameters, optimizer_state, guard), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=(out_shardings, None))


def make_evaluation_step(
    graph: nnx.GraphDef, objective: Objective = next_token
) -> Callable[[Any, Array, Array, int], tuple[Array, Array]]:
    """(parameters, tokens [B, T+1], those there [B, T], index of the batch) -> sum of losses, and
    how many they are, compiled."""

    @jax.jit
    def evaluation_step(
        parameters: Any, tokens: Array, there: Array, index: Array
    ) -> tuple[Array, Array]:
        key = jax.random.key(index)
        losses, counted = objective(nnx.merge(graph, parameters), tokens, there, key)
        return jnp.sum(losses * counted), jnp.sum(counted)

    return evaluation_step
