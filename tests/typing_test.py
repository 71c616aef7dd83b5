"""Runtime type checks in tests, and pytree classes."""

import os
from dataclasses import field, replace

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jaxtyping import TypeCheckError

from heinsen_jax.attention import build
from heinsen_jax.attention.cache import WindowCache
from heinsen_jax.typing import Array, pytree_dataclass
from tests.conftest import CHECK_TYPES

checked = pytest.mark.skipif(not os.environ.get(CHECK_TYPES), reason=f"{CHECK_TYPES} is not set")


@pytree_dataclass
class Pair:
    first: Array
    second: Array
    size: int = field(default=2, metadata={"static": True})


def test_leaves_are_the_fields_that_are_not_static():
    pair = Pair(jnp.zeros(3), jnp.ones(4), size=5)
    leaves, structure = jax.tree_util.tree_flatten_with_path(pair)
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [".first", ".second"]
    assert jax.tree.unflatten(structure, ["a", None]) == Pair("a", None, size=5)
    assert structure != jax.tree.structure(replace(pair, size=6))
    assert jax.jit(lambda x: replace(x, first=x.second))(pair).first.shape == (4,)


def test_a_static_field_is_no_argument_of_jit():
    assert int(jax.jit(lambda x: x.first.sum() * x.size)(Pair(jnp.ones(3), jnp.ones(1)))) == 6


def test_exported_functions_of_a_pytree_are_serialized():
    pytest.importorskip("flatbuffers")  # the extra `export`
    exported = jax.export.export(jax.jit(lambda x: x))(Pair(jnp.zeros(3), jnp.ones(4), size=5))
    read = jax.export.deserialize(exported.serialize())
    assert read.in_tree == exported.in_tree
    assert read.call(Pair(jnp.ones(3), jnp.ones(4), size=5)).size == 5


@checked
def test_shapes_of_a_state_are_checked_except_when_rebuilt_by_jax():
    keys, num_tokens = jnp.zeros((1, 4, 2, 8)), jnp.zeros((), jnp.int32)
    state = WindowCache((keys, keys), num_tokens)
    with pytest.raises(TypeCheckError):
        WindowCache((keys[0, 0, 0], keys[0, 0, 0]), num_tokens)
    with pytest.raises(TypeCheckError):
        WindowCache((keys, keys), jnp.zeros(3, jnp.int32))
    assert jax.tree.map(jnp.ndim, state).num_tokens == 0


@checked
def test_shapes_of_a_layer_are_checked():
    layer = build("linear", model_dim=8, num_heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(TypeCheckError):
        layer(jnp.zeros((1, 3, 8)), segment_ids=jnp.zeros((1, 4), jnp.int32))
