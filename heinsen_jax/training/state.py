"""What training changes, created where it will lie."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.sharding import shardings
from heinsen_jax.training.guard import Guard
from heinsen_jax.typing import Array, Integer, PyTree, pytree_dataclass


@pytree_dataclass
class TrainState:
    """Everything that a checkpoint must hold: the data's place is the step.

    Attributes:
      step: updates so far, those that were skipped included.
      parameters: the model's `nnx.State` of parameters.
      optimizer: optax's state.
      guard: what it knows of updates that were skipped.
    """

    step: Integer[Array, ""]
    parameters: PyTree[Array]
    optimizer: PyTree[Array]
    guard: Guard


Init: TypeAlias = Callable[[], TrainState]


def initializer(
    model: LanguageModelConfig, optimizer: optax.GradientTransformation, seed: int
) -> Init:
    """A function of no arguments that makes the first `TrainState`."""

    def init() -> TrainState:
        parameters = nnx.state(LanguageModel(model, rngs=nnx.Rngs(seed)), nnx.Param)
        start = jnp.zeros((), jnp.int32)
        return TrainState(start, parameters, optimizer.init(parameters), Guard.first())

    return init


def abstract_state(init: Init, mesh: Mesh) -> TrainState:
    """The shapes, dtypes and shardings of what `init` makes."""
    shapes = jax.eval_shape(init)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings(shapes, mesh),
    )


def init_sharded(init: Init, abstract: TrainState) -> TrainState:
    """Runs `init` with every array created in its place: no device ever holds the whole."""
    return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))()


def graph_of(model: LanguageModelConfig) -> nnx.GraphDef[LanguageModel]:
    """The model without its parameters, for `nnx.merge`."""
    return nnx.graphdef(nnx.eval_shape(lambda: LanguageModel(model, rngs=nnx.Rngs(0))))
