"""One update, and one evaluation batch, as compiled functions."""

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from heinsen_jax.attention.parameters import in_float32
from heinsen_jax.data import Batch
from heinsen_jax.models import LanguageModel
from heinsen_jax.objectives.objective import Losses, next_token
from heinsen_jax.training.optimizer import apply_updates
from heinsen_jax.training.state import TrainState
from heinsen_jax.typing import Array, Float, Integer, Key, PyTree, Shaped, wide

ROUNDING = 2**31
"""Number of the key of stochastic rounding; other keys of a step have small numbers."""
Metrics: TypeAlias = dict[str, Shaped[Array, ""]]
Sums: TypeAlias = tuple[tuple[Float[Array, ""], Float[Array, ""]], nnx.State]
"""Sum of the losses, their number, and the gradient of the sum."""


def make_train_step(
    graph: nnx.GraphDef[LanguageModel],
    optimizer: optax.GradientTransformation,
    *,
    accumulation_steps: int,
    out_shardings: TrainState | None,
    objective: Callable[..., Losses] = next_token,
    trained: PyTree[bool] | None = None,
    skip_grad_norm_ratio: float | None = None,
    z_loss: float = 0.0,
    ema_decay: float | None = None,
) -> jax.stages.Wrapped:
    """Return the jitted update, (state, batch, learning rate, key data) -> (state, metrics),
    which donates its input state. Further arguments are passed on to the objective.

    Random numbers of the objective depend on the key, the step and the microbatch. An update that
    `Guard` rejects changes neither the parameters nor the optimizer state nor the average of the
    weights, which is average + (1 - d) (parameters - average), with d = min(ema_decay, (1 + n) /
    (10 + n)) at step n, so that the initial weights lose their influence. `z_loss` is defined in
    `cross_entropy`.

    With accumulation, the gradients of `accumulation_steps` microbatches are summed in a loop: the
    update is the same as for the full batch, with the memory of one microbatch, but for random
    numbers such as the masks of masked models.
    """

    gradient = _make_gradient(graph, accumulation_steps, objective, trained, z_loss)

    def train_step(
        state: TrainState,
        batch: Batch,
        learning_rate: Float[Array, ""],
        key_data: Integer[Array, "_"],
        *constants: PyTree[Array],
    ) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.wrap_key_data(key_data), state.step)
        rounding_key = jax.random.fold_in(key, ROUNDING)
        loss, gradients = gradient(state.parameters, batch, key, *constants)
        with jax.named_scope("optimizer"):
            updates, optimizer_state = optimizer.update(
                gradients, state.optimizer, state.parameters
            )
            updates = optax.tree.scale(learning_rate, updates)
            is_good, guard = state.guard.check_update(
                loss, gradients, updates, skip_grad_norm_ratio
            )
            parameters = apply_updates(state.parameters, updates, rounding_key, trained)
            average = None
            if state.average is not None:
                assert ema_decay is not None
                rate = 1 - jnp.minimum(ema_decay, (1 + state.step) / (10 + state.step))
                average = jax.tree.map(  # exact where parameters do not change
                    lambda old, new: (old + rate * (new - old)).astype(old.dtype),
                    state.average,
                    parameters,
                )
            parameters, optimizer_state, average = jax.tree.map(
                lambda new, old: jnp.where(is_good, new, old),
                (parameters, optimizer_state, average),
                (state.parameters, state.optimizer, state.average),
            )
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
        metrics |= {"skipped": guard.skipped, "consecutive_skips": guard.consecutive_skips}
        return TrainState(state.step + 1, parameters, optimizer_state, guard, average), metrics

    return jax.jit(train_step, donate_argnums=0, out_shardings=(out_shardings, None))


def _make_gradient(
    graph: nnx.GraphDef[LanguageModel],
    accumulation_steps: int,
    objective: Callable[..., Losses],
    trained: PyTree[bool] | None,
    z_loss: float,
) -> Callable[..., tuple[Float[Array, ""], nnx.State]]:
    """Return the function (parameters, batch, key, *constants) -> (mean loss, gradients); gradients
    of parameters that are not `trained` are 0."""

    @partial(jax.value_and_grad, has_aux=True)
    def sums_of_part(
        parameters: nnx.State, batch: Batch, key: Key[Array, ""], *constants: PyTree[Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        if trained is not None:
            parameters = jax.tree.map(
                lambda x, is_trained: x if is_trained else lax.stop_gradient(x), parameters, trained
            )
        model = nnx.merge(graph, parameters)
        predictions = objective(model, batch, key, *constants)
        loss, _ = predictions.sums(z_loss)
        return loss, jnp.sum(predictions.loss_mask, dtype=loss.dtype)

    def gradient(
        parameters: nnx.State, batch: Batch, key: Key[Array, ""], *constants: PyTree[Array]
    ) -> tuple[Float[Array, ""], nnx.State]:
        sums = sums_of_part if accumulation_steps == 1 else sums_of_parts
        (loss, count), gradients = sums(parameters, batch, key, *constants)
        return loss / count, jax.tree.map(lambda x: in_float32(x) / count, gradients)

    def sums_of_parts(
        parameters: nnx.State, batch: Batch, key: Key[Array, ""], *constants: PyTree[Array]
    ) -> Sums:
        # Rows stay on their device: each part takes every accumulation_steps-th row.
        parts = jax.tree.map(
            lambda x: x.reshape(-1, accumulation_steps, x.shape[-1]).swapaxes(0, 1), batch
        )
        keys = jax.random.split(key, accumulation_steps)

        def add(total: Sums, part: tuple[Batch, Key[Array, ""]]) -> tuple[Sums, None]:
            sums = jax.tree.map(in_float32, sums_of_part(parameters, *part, *constants))
            return jax.tree.map(jnp.add, total, sums), None

        first = jax.tree.map(lambda x: x[0], (parts, keys))
        shapes = jax.eval_shape(sums_of_part, parameters, *first, *constants)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, wide(x.dtype)), shapes)
        return lax.scan(add, zeros, (parts, keys))[0]

    return gradient
