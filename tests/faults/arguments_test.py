"""Integers of small dtypes as ids and lengths, and states that are donated."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from heinsen_jax.generate import generate, stream
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.objectives.objective import MaskedTokens
from heinsen_jax.ops import (
    LinearAttentionState,
    dot_product_attention,
    edge_counts,
    l1_attention,
    l1_sparse_attention,
    linear_attention,
)
from heinsen_jax.ops.context import over_context, summary_of
from tests.attention import conformance_test as layers
from tests.models.small import random_model
from tests.ops.catalogue import OPS

SHORT = {"softmax, xla", "softmax, tiled", "dilated", "tglobal", "l1", "gated, by head", "additive"}
SHORT |= {"longformer", "memory_compressed, bidirectional"}
LEAST = {"int8": -128, "uint8": 128, "int32": -(2**31), "uint32": 2**32 - 128}
"""Numbers to add to ids of at most 127, so that the smallest or the largest id is among them."""


def draw(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


def masks(name: str) -> dict[str, np.ndarray]:
    """Segments, and lengths, that an op supports; 60 tokens."""
    ids = np.repeat([[0, 127, 126, 1], [1, 0, 3, 127]], 15, 1)
    lengths = np.array([[3, 47], [0, 60]] if OPS[name].padding == "both" else [43, 60])
    given = {"segment_ids": ids} if OPS[name].has_segments else {}
    return given | ({"key_value_seq_lengths": lengths} if OPS[name].padding else {})


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in SHORT else pytest.mark.nightly)
        for name in OPS
        if masks(name) and name != "linformer"  # its projections are as long as the sequence
    ],
)
def test_ids_and_lengths_of_small_dtypes_are_exact(name):
    op = OPS[name]
    arrays = [draw(2, 60, *shape) for shape in op.features]
    constants = [draw(*shape) for shape in op.constants]

    def as_type(dtype: str, least: int) -> dict[str, jax.Array]:
        shifts = {"segment_ids": least, "key_value_seq_lengths": 0}
        return {key: jnp.asarray(x + shifts[key], dtype) for key, x in masks(name).items()}

    @jax.jit
    def call(*options: dict[str, jax.Array]) -> list[jax.Array]:
        return [op(arrays, constants, **each) for each in options]

    want, *found = call(as_type("int32", 0), *(as_type(*pair) for pair in LEAST.items()))
    for have in found:
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-6)


def test_padding_is_beyond_lengths_that_small_dtypes_end_at():
    """The number of tokens, 300, is not among the numbers of 8 bits."""
    x = draw(1, 300, 1, 2)
    for op in (OPS["tglobal"].function, OPS["memory_compressed, bidirectional"].function):
        constants = [draw(*shape) for shape in OPS["memory_compressed"].constants]
        arrays = (x[..., 0, :],) if op is OPS["tglobal"].function else ()
        if not arrays:
            arrays = draw(1, 300, 4, 3), draw(1, 300, 2, 3), draw(1, 300, 2, 2), *constants
        call = jax.jit(partial(op, *arrays, is_causal=False))
        want, have = (
            call(key_value_seq_lengths=jnp.asarray([120], dtype)) for dtype in ("int32", "int8")
        )
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("uint32", marks=pytest.mark.nightly)])
def test_segments_of_a_split_sequence(dtype):
    """Positions of 300 tokens do not fit 8 bits."""
    mesh = jax.make_mesh((1,), ("context",))
    query, key, value = draw(1, 300, 1, 2), draw(1, 300, 1, 2), draw(1, 300, 1, 2)
    ids = np.arange(300)[None] // 60

    def split(*arrays):
        *heads, ids = arrays
        return over_context(
            partial(linear_attention, return_state=True),
            *heads,
            summary=summary_of(linear_attention),
            empty=LinearAttentionState.empty((1,), 1, 2, 2),
            segment_ids=ids,
            return_state=True,
        )

    spec = PartitionSpec()
    with jax.set_mesh(mesh):
        mapped = jax.shard_map(split, in_specs=spec, out_specs=spec, check_vma=False)
        shifted = jnp.asarray(ids + (2**31 if dtype == "uint32" else 0), dtype)
        have = jax.jit(mapped)(query, key, value, shifted)
    ids = jnp.asarray(ids, jnp.int32)
    whole = jax.jit(partial(linear_attention, return_state=True))
    want = whole(query, key, value, segment_ids=ids)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), have, want)


def test_offsets_of_small_dtypes():
    query, key = draw(20, 2, 3), draw(140, 2, 3)
    decay = -jnp.abs(draw(140, 2))

    @jax.jit
    def calls(*offsets: jax.Array) -> list[jax.Array]:
        options = [{"is_causal": True, "query_offset": offset} for offset in offsets]
        return [
            jnp.stack(
                [
                    dot_product_attention(query, key, key, **each),
                    dot_product_attention(query, key, key, log_decay=decay, **each),
                    l1_attention(query, key, key, **each),
                ]
            )
            for each in options
        ]

    want, *found = calls(*(jnp.asarray(119, x) for x in ("int32", "uint8", "int8", "uint32")))
    for have in found:
        np.testing.assert_array_equal(have, want)


@pytest.mark.parametrize("dtype", ["uint8", "int8", "int16", "uint32"])
def test_edges_of_small_dtypes(dtype):
    edges = np.array([[127, 0], [127, 126], [1, 127]])
    x = draw(128 if dtype == "int8" else 300, 1, 2)
    have, want = (l1_sparse_attention(x, x, x, edges.astype(kind)) for kind in (dtype, "int64"))
    np.testing.assert_array_equal(have, want)
    traced = jax.jit(l1_sparse_attention)(x, x, x, jnp.asarray(edges, dtype))
    np.testing.assert_allclose(traced, want, rtol=1e-6)
    np.testing.assert_array_equal(edge_counts(edges.astype(dtype))[0], edge_counts(edges)[0])
    with pytest.raises(ValueError, match=r"edge 0 is \(127, 0\)"):
        l1_sparse_attention(x[:100], x, x, edges.astype(dtype))


VOCAB_SIZE = 300


@pytest.mark.parametrize(
    "dtype",
    [
        "uint8",
        *(
            pytest.param(dtype, marks=pytest.mark.nightly)
            for dtype in ("int8", "uint16", "int16", "uint32")
        ),
    ],
)
def test_a_language_model_with_tokens_of_small_dtypes(dtype):
    config = LanguageModelConfig(
        vocab_size=VOCAB_SIZE, model_dim=8, num_layers=1, num_heads=2, attention="softmax"
    )
    model = random_model(config)
    tokens = np.random.default_rng(0).integers(0, 128, (2, 9))
    ids = np.repeat([[0, 127, 1], [9, 2, 127]], 3, 1)
    want, have = (
        model(jnp.asarray(tokens, kind), segment_ids=jnp.asarray(ids, kind))
        for kind in ("int32", dtype)
    )
    np.testing.assert_array_equal(have, want)
    random = {"temperature": 9.0, "key": jax.random.key(0)}
    want, have = (
        generate(model, jnp.asarray(tokens[0], kind), 24, **random) for kind in ("int32", dtype)
    )
    assert int(want.max()) > 255  # so that the new tokens fit no dtype of 8 bits
    np.testing.assert_array_equal(have, want)
    streamed = stream(model, jnp.asarray(tokens[0], dtype), **random)
    assert [next(streamed) for _ in range(24)] == want.tolist()


def test_the_id_of_masked_tokens_fits():
    masked, drawn = MaskedTokens(0.5, 256).mask(jnp.zeros((1, 40), jnp.uint8), jax.random.key(0))
    assert int(masked.max()) == 256
    assert int(drawn.sum()) == 20


def assert_can_be_donated(state: object, *others: object) -> None:
    """Assert that no buffer is in the state twice, or in other arrays."""

    def buffers(tree: object) -> list[int]:
        return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) if x.size]

    assert len(set(buffers(state))) == len(buffers(state))
    assert not set(buffers(state)) & set(buffers(others))
    donated = jax.jit(lambda x: jax.tree.map(jnp.negative, x), donate_argnums=0)(state)
    jax.block_until_ready((donated, others))


@layers.able("streaming")
@pytest.mark.parametrize("batch", [(), (2,)])
def test_states_of_layers_can_be_donated(variant, batch):
    layer = layers.build(variant)
    assert_can_be_donated(layer.init_state(batch, capacity=8), nnx.state(layer))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.state])
def test_empty_states_of_ops_can_be_donated(name, batch):
    constants = [draw(*shape) for shape in OPS[name].constants]
    make = OPS[name].state
    assert make is not None
    assert_can_be_donated(make(batch, jnp.float32, *constants), constants)


@pytest.mark.parametrize("mechanism", ["additive", "longformer", "rmt", "log"])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_states_of_language_models_can_be_donated(mechanism, batch):
    sizes = {"vocab_size": 11, "model_dim": 8, "num_layers": 2, "num_heads": 2}
    model = random_model(LanguageModelConfig(**sizes, attention=mechanism))
    assert_can_be_donated(model.init_state(batch), nnx.state(model))
