"""Shardings of layers and models on explicit axes; values are in
tests/multi_device/explicit_test.py."""

import jax
import jax.numpy as jnp
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
    with pytest.raises(NotImplementedError, match="SoftmaxAttention is not mergeable"):
        streamed(random_layer("softmax"), array((4, 16, MODEL_DIM), "a", "b"))
