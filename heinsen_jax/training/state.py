"""The state of training, initialized with its sharding."""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from heinsen_jax.attention.parameters import in_float32
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.sharding import shardings
from heinsen_jax.training.guard import Guard
from heinsen_jax.typing import Array, Integer, PyTree, pytree_dataclass


@pytree_dataclass
class TrainState:
    """The content of a checkpoint; the position in the data is the step.

    Attributes:
      step: number of updates, including skipped ones.
      parameters: the model's `nnx.State` of parameters.
      optimizer: the state of the optimizer.
      guard: the record of skipped updates.
      average: the moving average of the parameters; None without any.
    """

    step: Integer[Array, ""]
    parameters: PyTree[Array]
    optimizer: PyTree[Array]
    guard: Guard
    average: PyTree[Array] | None = None

    @property
    def weights(self) -> PyTree[Array]:
        """The parameters to evaluate: their average, if any."""
        return self.parameters if self.average is None else self.average


Init: TypeAlias = Callable[..., TrainState]


def initializer(
    model: LanguageModelConfig,
    optimizer: optax.GradientTransformation,
    seed: int,
    *,
    has_average: bool = False,
) -> Init:
    """Return a function that creates the initial `TrainState`, with an average of the parameters if
    `has_average`, given parameters by name; all others are initialized randomly."""

    def init(given: Mapping[str, Array] | None = None) -> TrainState:
        parameters = nnx.state(LanguageModel(model, rngs=nnx.Rngs(seed)), nnx.Param)
        if given:
            random = flatten_with_names(parameters)
            initial = [given.get(name, x).astype(x.dtype) for name, x in random.items()]
            parameters = jax.tree.unflatten(jax.tree.structure(parameters), initial)
        start = jnp.zeros((), jnp.int32)
        average = jax.tree.map(jnp.copy, parameters) if has_average else None
        moments = optimizer.init(jax.tree.map(in_float32, parameters))
        return TrainState(start, parameters, moments, Guard.first(), average)

    return init


def abstract_state(init: Init, mesh: Mesh) -> TrainState:
    """Shapes, dtypes and shardings of the result of `init`."""
    shapes = jax.eval_shape(init)
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        shardings(shapes, mesh),
    )


def init_sharded(
    init: Init, abstract: TrainState, given: Mapping[str, np.ndarray] | None = None
) -> TrainState:
    """Run `init`, with given parameters by name, with sharded inputs and outputs, so that no device
    holds a complete array."""
    leaves = flatten_with_names(abstract.parameters)
    given = given or {}
    sharded = {name: jax.device_put(x, leaves[name].sharding) for name, x in given.items()}
    return jax.jit(init, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))(sharded)


def graph_of(model: LanguageModelConfig) -> nnx.GraphDef[LanguageModel]:
    """The graph definition of the model, for `nnx.merge`."""
    return nnx.graphdef(LanguageModel.abstract(model))
