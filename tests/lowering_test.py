"""Updates and generation can be lowered for accelerators on a machine without any."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from heinsen_jax.attention import mechanism, names
from heinsen_jax.data import Batch
from heinsen_jax.generate import generate
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.training.config import OptimizerConfig
from heinsen_jax.training.optimizer import make_optimizer
from heinsen_jax.training.state import graph_of, initializer
from heinsen_jax.training.step import make_train_step

PLATFORMS = "tpu", "cuda"
each = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.nightly] * (name != "linear"))
        for name in names()
        if mechanism(name).capabilities.streaming
    ],
)


def config(name: str) -> LanguageModelConfig:
    return LanguageModelConfig(
        vocab_size=64, model_dim=16, num_layers=2, num_heads=2, attention=name
    )


@each
def test_an_update(name):
    optimizer = make_optimizer(OptimizerConfig())
    state = jax.eval_shape(initializer(config(name), optimizer, 0))
    step = make_train_step(
        graph_of(config(name)), optimizer, accumulation_steps=1, out_shardings=None
    )
    batch = Batch(*map(jax.ShapeDtypeStruct, ((2, 33), (2, 32)), (jnp.int32, jnp.bool_)))
    others = jnp.float32(1e-3), jax.random.key_data(jax.random.key(0))
    exported = jax.export.export(step, platforms=PLATFORMS)(state, batch, *others)
    assert exported.platforms == PLATFORMS


@each
def test_generation(name):
    model = LanguageModel(config(name), rngs=nnx.Rngs(0))
    graph, parameters = nnx.split(model)

    @jax.jit
    def write(parameters, tokens):
        model = nnx.merge(graph, parameters)
        state = model.init_state((), capacity=16)
        return generate(model, tokens, 4, top_k=1, state=state)

    tokens = jax.ShapeDtypeStruct((5,), jnp.int32)
    exported = jax.export.export(write, platforms=PLATFORMS)(parameters, tokens)
    assert exported.out_avals[0].shape == (4,)
