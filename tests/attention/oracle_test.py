"""Values and gradients of every mechanism's layer, against its definition in float64."""

from collections.abc import Mapping
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention
from heinsen_jax.ops.performer import orthogonal_features
from tests.attention.matrix_oracles import dense_states
from tests.attention.oracles import ORACLES

pytestmark = [pytest.mark.usefixtures("x64")]

MODEL_DIM, NUM_HEADS, BATCH, LENGTH = 24, 4, 2, 13
STEP = 1e-6  # step of differences: errors are near 1e-11, and few kinks, as of |x|, are crossed

# Sizes at which windows, blocks and segments end within the tokens. Default log-attention compiles
# slowly.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (name, attention.mechanism(name).short_options(16)) for name in attention.names()
}
VARIANTS |= {
    "log": ("log", {}),
    "log, window": ("log", {"window_size": 5, "implementation": "scan"}),
    "log, decay of heads": ("log", {"decay": "head", "implementation": "scan"}),
    "log, decay of features": (
        "log",
        {"decay": "feature", "num_kv_heads": 2, "implementation": "reference"},
    ),
    "log, decay and window": (
        "log",
        {"decay": "feature", "window_size": 9, "implementation": "scan"},
    ),
    "log, decay and window in chunks": ("log", {"decay": "feature", "window_size": 9}),
    "log, not gated": ("log", {"gated": False, "value_depth": 5, "implementation": "scan"}),
    "log, linear values": ("log", {"values": "linear", "gated": False, "implementation": "scan"}),
    "log, linear values that decay": (
        "log",
        {"values": "linear", "decay": "feature", "query_key_norm": True, "value_depth": 5},
    ),
    "softmax": ("softmax", {}),
    "softmax, rotary": (
        "softmax",
        {"positions": "rotary", "query_key_norm": True, "num_kv_heads": 2},
    ),
    "softmax, norms of all heads": (
        "softmax",
        {"positions": "rotary", "query_key_norm": "joint", "num_kv_heads": 2},
    ),
    "softmax, output gate by feature": (
        "softmax",
        {"output_gate": "feature", "query_key_norm": True, "zero_centered_norm": True},
    ),
    "softmax, output gate by head": ("softmax", {"output_gate": "head", "value_depth": 3}),
    "softmax, gated": ("softmax", {"gated": True, "key_depth": 3, "value_depth": 5}),
    "gqa": ("gqa", {}),
    "gqa, two groups": ("gqa", {"num_kv_heads": 2}),
    "mla": ("mla", {}),
    "mla, queries of low rank": ("mla", {"query_rank": 5, "rotary_depth": 4, "value_depth": 3}),
    "sliding_window": ("sliding_window", {"window_size": 5}),
    "sliding_window, rotary": ("sliding_window", {"window_size": 5, "positions": "rotary"}),
    "sliding_window, itself": ("sliding_window", {"window_size": 1}),
    "sliding_window, sinks": (
        "sliding_window",
        {"window_size": 4, "num_sinks": 3, "positions": "rotary"},
    ),
    "dilated": ("dilated", {"window_size": 3, "dilation": 4}),
    "dilated, short": ("dilated", {"window_size": 2, "dilation": 3}),
    "longformer": ("longformer", {"window_size": 4, "num_global_tokens": 2}),
    "tglobal": ("tglobal", {"radius": 4, "block_size": 4, "num_buckets": 6, "max_distance": 6}),
    "block_sparse, local": ("block_sparse", {"pattern": "local", "block_size": 4}),
    "block_sparse, strided": ("block_sparse", {"pattern": "strided", "block_size": 4}),
    "block_sparse": ("block_sparse", {"block_size": 5, "num_summaries": 2}),
    "memory_compressed": ("memory_compressed", {"num_kv_heads": 2, "value_depth": 5}),
    "linformer": ("linformer", {"max_length": 16, "rank": 5, "num_kv_heads": 2}),
    "linear": ("linear", {}),
    "linear, relu": ("linear", {"feature_map": "relu", "num_kv_heads": 2}),
    "performer": ("performer", {"num_features": 10}),
    "colt5": ("colt5", {"window_size": 3, "num_queries": 4, "num_sources": 6}),
    "rmt": ("rmt", {"segment_length": 5, "num_memories": 2}),
    "l1": ("l1", {}),
    "l1, one key more": ("l1", {"denominator_bias": 1.0, "num_kv_heads": 2}),
    "l1_sparse": ("l1_sparse", {"window_size": 2}),
    "l1_sparse, near": ("l1_sparse", {"window_size": 4, "far": False, "denominator_bias": 0.5}),
    "additive": ("additive", {}),
    "log, hedgehog": ("log", {"features": "hedgehog", "values": "linear", "num_kv_heads": 2}),
    "log, hedgehog and decay": (
        "log",
        {"features": "hedgehog", "decay": "feature", "gated": False},
    ),
    "log, product": (
        "log",
        {"features": "product", "key_depth": 6, "num_kv_heads": 2, "query_key_norm": True},
    ),
    "log, product and decay": (
        "log",
        {"features": "product", "key_depth": 4, "decay": "feature", "values": "linear"},
    ),
    "log, coupled decay": ("log", {"decay": "coupled", "values": "linear", "num_kv_heads": 2}),
    "softmax, alibi": ("softmax", {"positions": "alibi", "num_kv_heads": 2}),
    "retnet": ("retnet", {}),
    "gla": ("gla", {"decay_rank": 3}),
    "hgrn2": ("hgrn2", {}),
    "hgrn2, lower bound": ("hgrn2", {"lower_bound": 0.3, "key_depth": 5}),
    "mamba2": ("mamba2", {"key_depth": 5}),
    "mamba2, groups": (
        "mamba2",
        {"key_depth": 5, "num_key_heads": 2, "num_value_heads": 6, "convolution_bias": False},
    ),
    "mamba2, multipliers and no norm": (
        "mamba2",
        {"key_depth": 5, "output_norm": "none", "gate_multiplier": 0.3, "value_multiplier": 1.7},
    ),
    "gqa+mamba2": (
        "gqa+mamba2",
        {
            "gqa.num_kv_heads": 2,
            "gqa.output_multiplier": 0.7,
            "mamba2.key_depth": 5,
            "mamba2.num_key_heads": 2,
            "mamba2.output_norm": "before_gate",
            **{"mamba2.query_multiplier": 0.6, "mamba2.key_multiplier": 1.3},
            **{"mamba2.step_multiplier": 0.8, "mamba2.output_multiplier": 0.9},
        },
    ),
    "gated_deltanet, sigmoid by head": (
        "gated_deltanet",
        {"output_gate": "head", "gate_activation": "sigmoid"},
    ),
    "deltanet, gate": ("deltanet", {"output_gate": "feature"}),
    "kda, lower bound": ("kda", {"decay_lower_bound": -5.0}),
    "gated_deltanet2": ("gated_deltanet2", {}),
    "gated_deltanet2, negative": (
        "gated_deltanet2",
        {"negative_eigenvalues": True, "key_depth": 3, "value_depth": 5},
    ),
    "gated_deltaproduct": ("gated_deltaproduct", {}),
    "gated_deltaproduct, three steps": (
        "gated_deltaproduct",
        {"num_steps": 3, "key_depth": 3, "negative_eigenvalues": False},
    ),
    "rwkv7": ("rwkv7", {"decay_rank": 3, "gate_rank": 5}),
    "goom_ssm": ("goom_ssm", {"state_depth": 5}),
    "short_convolution": ("short_convolution", {}),
    "short_convolution, biases": ("short_convolution", {"use_bias": True, "convolution_size": 5}),
    "deltanet": ("deltanet", {}),
    "deltanet, no convolutions": ("deltanet", {"convolution_size": 0, "value_depth": 3}),
    "gated_deltanet": ("gated_deltanet", {"key_depth": 3, "negative_eigenvalues": True}),
    "kda": ("kda", {}),
    "mlstm": ("mlstm", {}),
    "taylor": ("taylor", {"key_depth": 4, "num_kv_heads": 2}),
    "taylor, five terms": ("taylor", {"key_depth": 2, "num_terms": 5}),
    "fox": ("fox", {"num_kv_heads": 2}),
    "gated_deltanet, shared keys": ("gated_deltanet", {"num_key_heads": 1}),
    "gated_deltanet, groups": ("gated_deltanet", {"num_key_heads": 2, "num_value_heads": 4}),
    "fox, gated": ("fox", {"gated": True, "query_key_norm": True}),
    "additive, window": ("additive", {"window_size": 4}),
    "log_window": ("log_window", {"window_size": 4, "num_kv_heads": 2}),
    "log_window, decay": (
        "log_window",
        {"window_size": 3, "num_kv_heads": 2, "decay": "head"},
    ),
    "log_window, rotary": (
        "log_window",
        {"window_size": 3, "positions": "rotary", "query_key_norm": True},
    ),
    "log_window, identity": (
        "log_window",
        {"window_size": 5, "features": "identity", "value_depth": 5, "gated": True},
    ),
}


@cache
def shapes_of(variant: str, **options: Any) -> attention.Attention:
    """Return the layer, with shapes in place of parameters."""
    name, config = VARIANTS[variant]
    sizes = {"model_dim": MODEL_DIM, "num_heads": NUM_HEADS}
    return nnx.eval_shape(
        lambda: attention.build(name, **sizes, rngs=nnx.Rngs(0), **config, **options)
    )


def cases() -> list[tuple[str, bool]]:
    """Return all variants, in the directions that they declare."""
    can = {variant: shapes_of(variant).capabilities for variant in VARIANTS}
    causal = [(variant, True) for variant in VARIANTS if can[variant].causal]
    return causal + [(variant, False) for variant in VARIANTS if can[variant].bidirectional]


FIRST = {name: variant for variant, (name, _) in reversed(VARIANTS.items())}
SHORT = {*FIRST.values(), "log, decay of features", "log, product", "log, coupled decay"}
SHORT |= {"linear, relu", "l1, one key more"}


def is_short(variant: str, is_causal: bool) -> bool:
    """Variant of a mechanism, in one direction."""
    return variant in SHORT and is_causal == shapes_of(variant).capabilities.causal


each = pytest.mark.parametrize(
    ("variant", "is_causal"),
    [
        pytest.param(
            *case,
            id=f"{case[0]}-{'causal' if case[1] else 'bidirectional'}",
            marks=[] if is_short(*case) else [pytest.mark.nightly],
        )
        for case in cases()
    ],
)


class Run(NamedTuple):
    """Output of the layer for `inputs`, x and its parameters by path."""

    layer: attention.Attention
    inputs: dict[str, np.ndarray]
    y: np.ndarray
    cotangent: np.ndarray
    gradients: dict[str, np.ndarray]


def path_of(keys: Any) -> str:
    return ".".join(str(key.key) for key in keys[:-1])


def run(variant: str, is_causal: bool) -> Run:
    layer = shapes_of(variant, dtype=jnp.float64, param_dtype=jnp.float64)
    graph, shapes = nnx.split(layer)
    rng = np.random.default_rng(0)
    inputs = {"x": rng.standard_normal((BATCH, LENGTH, MODEL_DIM))}
    for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes):
        name = path_of(keys)
        inputs[name] = name.endswith("scale") + 0.3 * rng.standard_normal(leaf.shape)

    def call(inputs: dict[str, jax.Array]) -> jax.Array:
        parameters = jax.tree.map_with_path(lambda keys, _: inputs[path_of(keys)], shapes)
        return nnx.merge(graph, parameters)(inputs["x"], is_causal=is_causal)

    @jax.jit
    def value_and_gradients(inputs: Any, cotangent: Any) -> Any:
        y, pullback = jax.vjp(call, inputs)
        return y, pullback(cotangent)[0]

    cotangent = rng.standard_normal((BATCH, LENGTH, MODEL_DIM))
    y, gradients = jax.tree.map(np.asarray, value_and_gradients(inputs, cotangent))
    return Run(layer, inputs, y, cotangent, gradients)


def expected(
    layer: Any, variant: str, is_causal: bool, inputs: Mapping[str, np.ndarray]
) -> np.ndarray:
    name, _ = VARIANTS[variant]
    if name == "performer":  # drawn instead of computed
        seed = jax.random.key(layer.config.seed)
        features = orthogonal_features(seed, layer.num_features, layer.key_depth)
        inputs = {**inputs, "features": np.asarray(features, np.float64)}
    sequences = [inputs] * BATCH
    if "other_states" in inputs:
        sequences = [{**inputs, "other_states": states} for states in inputs["other_states"]]
    return np.stack(
        [
            ORACLES[name](layer, parameters, x, is_causal)
            for parameters, x in zip(sequences, inputs["x"], strict=True)
        ]
    )


def test_every_mechanism_has_an_oracle():
    assert {*attention.names(), "gqa+mamba2"} == {*ORACLES} == {x for x, _ in VARIANTS.values()}


@each
def test_values_and_gradients(variant, is_causal):
    """Compare directional derivatives by x and by each parameter with differences of the
    oracle."""
    have = run(variant, is_causal)
    oracle = partial(expected, have.layer, variant, is_causal)
    assert have.y.dtype == np.float64
    np.testing.assert_allclose(have.y, oracle(have.inputs), rtol=0, atol=1e-10)
    rng = np.random.default_rng(1)
    constants = {}
    if variant.startswith("goom_ssm"):  # maxima of states are constant in gradients
        constants["other_states"] = [dense_states(have.inputs, x) for x in have.inputs["x"]]
    for name, gradient in have.gradients.items():
        direction = rng.standard_normal(gradient.shape)
        moved = (
            have.inputs | constants | {name: have.inputs[name] + s * direction}
            for s in (STEP, -STEP)
        )
        after, before = map(oracle, moved)
        terms = have.cotangent * (after - before) / (2 * STEP)
        size = np.sum(np.abs(terms))
        assert size > 1e-3, f"nothing depends on {name}"
        np.testing.assert_allclose(
            np.sum(gradient * direction), np.sum(terms), rtol=0, atol=1e-8 * size, err_msg=name
        )
