"""Shardings of layers and models on explicit axes; values are in
tests/multi_device/explicit_test.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from heinsen_jax.models import LanguageModel, LanguageModelConfig
from tests.attention.small import MODEL_DIM, random_layer

MESH = AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)


def array(shape: tuple[int, ...], *spec: str | None, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(MESH, PartitionSpec(*spec)))


def streamed(layer: nnx.Module, x: jax.ShapeDtypeStruct):
    return jax.eval_shape(lambda x: layer(x, return_state=True), x)


@pytest.mark.parametrize("name", ["linear", "softmax", "mamba2"])
def test_outputs_and_states_are_split_like_the_tokens(name):
    x = array((4, 16, MODEL_DIM), "a")
    y, state = streamed(random_layer(name), x)
    assert y.sharding.spec == PartitionSpec("a", None, None)
    assert {leaf.sharding.spec[0] for leaf in jax.tree.leaves(state)} == {"a"}
    y, _ = streamed(random_layer(name), array((2, 4, 16, MODEL_DIM), "b", "a"))
    assert y.sharding.spec == PartitionSpec("b", "a", None, None)


def test_logits_are_split_by_the_vocabulary_of_the_embedding():
    config = LanguageModelConfig(vocab_size=8, model_dim=8, num_layers=1, num_heads=2)
    graph, parameters = nnx.split(LanguageModel.abstract(config))

    def place(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata().get("logical_axes", ())
        spec = ["b" if axis == "vocab" else None for axis in axes]
        shape = variable.get_value().shape
        return variable.replace(array(shape, *[None] * (len(shape) - len(axes)), *spec))

    split = jax.tree.map(place, parameters, is_leaf=lambda x: isinstance(x, nnx.Variable))
    tokens = array((4, 16), "a", dtype=jnp.int32)
    logits = jax.eval_shape(lambda p, tokens: nnx.merge(graph, p)(tokens), split, tokens)
    assert logits.sharding.spec == PartitionSpec("a", None, "b")


def test_split_tokens_need_states_that_merge():
    y, _ = streamed(random_layer("linear"), array((4, 16, MODEL_DIM), "a", "b"))
    assert y.sharding.spec == PartitionSpec("a", "b", None)
    with pytest.raises(NotImplementedError, match="SoftmaxAttention: no capability 'mergeable'"):
        streamed(random_layer("softmax"), array((4, 16, MODEL_DIM), "a", "b"))


def test_a_mesh_that_splits_nothing_has_no_rules():
    """Also with the names of the trainer's axes."""
    mesh = AbstractMesh((2, 2), ("data", "context"), axis_types=(AxisType.Explicit,) * 2)
    x = jax.ShapeDtypeStruct(
        (4, 16, MODEL_DIM), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    y, _ = streamed(random_layer("softmax"), x)
    assert y.sharding.spec == PartitionSpec(None, None, None)


def test_parameters_may_be_split_over_the_axis_of_the_batch():
    graph, parameters = nnx.split(random_layer("linear"))

    def place(variable: nnx.Variable) -> nnx.Variable:
        axes = variable.get_metadata().get("logical_axes", ())
        spec = ["a" if axis == "heads" else None for axis in axes]
        return variable.replace(array(variable.get_value().shape, *spec))

    split = jax.tree.map(place, parameters, is_leaf=lambda x: isinstance(x, nnx.Variable))
    x = array((4, 16, MODEL_DIM), "a")
    y = jax.eval_shape(lambda p, x: nnx.merge(graph, p)(x), split, x)
    assert y.sharding.spec == PartitionSpec("a", None, None)


def test_arguments_may_be_named():
    layer, x = random_layer("linear"), np.ones((2, 4, MODEL_DIM), np.float32)
    np.testing.assert_array_equal(layer(x=x), layer(x))


def test_ids_outside_the_vocabulary_are_refused_on_a_mesh():
    config = LanguageModelConfig(vocab_size=8, model_dim=8, num_layers=1, num_heads=2)
    mesh = jax.make_mesh((1,), ("a",))
    tokens = jax.device_put(np.full((1, 4), 99), NamedSharding(mesh, PartitionSpec("a")))
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="99"):
        model(tokens)
