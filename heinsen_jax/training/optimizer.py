"""AdamW under a one-cycle learning rate, with weight decay on matrices and embeddings only."""

from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pydantic

from heinsen_jax.errors import UserError
from heinsen_jax.typing import Array, PyTree, config_dataclass

DECAYED = ("kernel", "embedding", "key_up", "value_up", "of_keys", "of_values")
"""Parameters with weight decay, by the last part of their name; biases and norms have none."""


@config_dataclass
class OptimizerConfig:
    """AdamW with a one-cycle learning rate. The defaults are the paper's where it gives them (rates
    from 6e-4 to 6e-5), else nanoGPT's."""

    learning_rate: pydantic.PositiveFloat = 6e-4
    """Peak learning rate, after warm-up."""
    end_learning_rate: pydantic.NonNegativeFloat = 6e-5
    """Learning rate at the last step of the cosine schedule."""
    warmup_steps: pydantic.NonNegativeInt = 100
    """Number of steps of linear warm-up."""
    beta1: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.9
    """Decay rate of the first moment (Adam)."""
    beta2: Annotated[float, pydantic.Field(ge=0, lt=1)] = 0.95
    """Decay rate of the second moment (Adam)."""
    weight_decay: pydantic.NonNegativeFloat = 0.1
    """Decoupled weight decay of matrices and embeddings, multiplied by the learning rate."""
    clip_norm: pydantic.PositiveFloat = 1.0
    """Clip gradients to this global norm."""


def learning_rates(config: OptimizerConfig, steps: int) -> np.ndarray:
    """Learning rate of every step: linear warm-up to the peak rate, then a cosine schedule that
    would reach the last rate one step after the end.

    Raises:
      UserError: warm-up is not shorter than training.
    """
    if config.warmup_steps >= steps:
        raise UserError(
            f"optimizer.warmup_steps={config.warmup_steps} is not less than training.steps={steps};"
            " make it smaller, or train for more steps"
        )
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (config.warmup_steps + 1),
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.end_learning_rate,
    )
    return np.asarray(jax.jit(jax.vmap(schedule))(jnp.arange(steps)), np.float32)


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with learning rate 1: the update multiplies its result by
    the rate of the step, so that the compiled update does not depend on the schedule."""
    adamw = optax.adamw(
        1.0,
        b1=config.beta1,
        b2=config.beta2,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decay_mask(parameters: PyTree[Array | jax.ShapeDtypeStruct]) -> PyTree[bool]:
    """Pytree of booleans: the parameters to which weight decay applies."""

    def is_decayed(path: jax.tree_util.KeyPath, _: Array | jax.ShapeDtypeStruct) -> bool:
        return any(getattr(entry, "key", None) in DECAYED for entry in path)

    return jax.tree_util.tree_map_with_path(is_decayed, parameters)
