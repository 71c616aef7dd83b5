"""Mechanisms whose state is a matrix per head: initial values, gates, and sequences in chunks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention
from tests.attention.small import MODEL_DIM, assert_chunks_equal_one_pass, random_layer

RATES = {"exp(to_log_decay.log_rate)": (1, 16), "softplus(to_log_decay.bias)": (1e-3, 0.1)}
RANGES = {
    "gated_deltanet": RATES,
    "kda": RATES,
    "mamba2": RATES | {"skip": (1, 1), "convolutions.0.bias": (0, 0), "norm.scale": (1, 1)},
    "mlstm": {"forget_gate.bias": (3, 6), "input_gate.bias": (0, 0), "norm_scale": (1, 1)},
    "hgrn2": {"sigmoid(bound)": (0.3, 0.3)},
    "rwkv7": {"decay.up.bias": (-6, 0), "key_scale": (0.71, 0.71), "mixes.gate": (0.5, 0.5)},
}
FUNCTIONS = {
    "exp": np.exp,
    "softplus": lambda x: np.log1p(np.exp(x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
}


@pytest.mark.parametrize("name", RANGES)
def test_initial_values(name):
    """They cover much of their published ranges, and nothing else."""
    options = {"lower_bound": 0.3} if name == "hgrn2" else {}
    sizes = {"model_dim": 64, "num_heads": 32}
    state = nnx.state(attention.build(name, **sizes, rngs=nnx.Rngs(0), **options))
    values = {
        ".".join(str(key.key) for key in keys[:-1]): np.asarray(x, np.float64)
        for keys, x in jax.tree_util.tree_leaves_with_path(state)
    }
    for field, (low, high) in RANGES[name].items():
        function, _, path = field.rstrip(")").rpartition("(")
        value = FUNCTIONS.get(function, np.asarray)(values[path])
        assert value.min() >= low - 1e-5 * abs(low)
        assert value.max() <= high + 1e-5 * abs(high)
        assert value.max() - value.min() >= 0.7 * (high - low)


@pytest.mark.parametrize("name", ["retnet", "gla", "mamba2"])
def test_default_widths_are_published_multiples(name):
    layer = nnx.eval_shape(
        lambda: attention.build(name, model_dim=64, num_heads=4, rngs=nnx.Rngs(0))
    )
    depths = {"retnet": (16, 32), "gla": (8, 16), "mamba2": (128, 32)}
    assert (layer.key_depth, layer.value_depth) == depths[name]


@pytest.mark.parametrize(
    "name", ["retnet", "gated_deltanet", "mlstm", "rwkv7", "short_convolution"]
)
def test_chunks_equal_one_pass(name):
    """Also positions and convolutions continue."""
    assert_chunks_equal_one_pass(random_layer(name), [4, 3])


def test_decays_of_retention_are_fixed_by_head():
    decay = random_layer("retnet").gates(jnp.zeros((3, MODEL_DIM)))["log_decay"]
    np.testing.assert_allclose(decay, np.log([[1 - 1 / 32, 1 - 1 / 64]] * 3), rtol=1e-6)


def test_decays_of_gated_linear_attention_are_small():
    layer = random_layer("gla")
    decay = layer.gates(jnp.zeros((1, MODEL_DIM)))["log_decay"]
    expected = -np.log1p(np.exp(-np.asarray(layer.decay.up.bias[...]))) / 16
    np.testing.assert_allclose(decay.ravel(), expected, rtol=1e-5)


def test_steps_of_mamba_scale_the_values_and_the_decay():
    layer, x = random_layer("mamba2"), jnp.ones((1, MODEL_DIM))
    gates = layer.gates(x)
    step = np.log1p(np.exp(layer.step(x) + layer.to_log_decay.bias[...][None]))
    np.testing.assert_allclose(gates["write"], step, rtol=1e-5)
    decay = -np.exp(layer.to_log_decay.log_rate[...])[None] * step
    np.testing.assert_allclose(gates["log_decay"], decay, rtol=1e-5)


def test_negative_eigenvalues_double_what_a_token_replaces():
    x = jnp.ones((1, MODEL_DIM))
    one, two = (
        random_layer("deltanet", negative_eigenvalues=negative).gates(x)
        for negative in (False, True)
    )
    for gate in ("erase", "write"):
        np.testing.assert_allclose(two[gate], 2 * one[gate])
    one, two = (
        random_layer("gated_deltanet2", negative_eigenvalues=negative).gates(x)
        for negative in (False, True)
    )
    assert 0 < np.min(one["erase"]) < np.max(one["erase"]) < 1
    np.testing.assert_allclose(two["erase"], 2 * one["erase"])
    np.testing.assert_array_equal(two["write"], one["write"])


def test_forget_gates_of_hgrn2_are_at_most_1():
    layer = random_layer("hgrn2", lower_bound=0.35)
    logits = jnp.linspace(10, 20, 4001)[:, None, None] * jnp.ones((1, layer.num_heads, 1))
    log_forget = layer._log_forget(jnp.repeat(logits, layer.key_depth, -1))
    assert log_forget.max() == 0


def test_keys_of_hgrn2_are_the_complements_of_its_forget_gates():
    layer, x = random_layer("hgrn2", lower_bound=0.3), jnp.ones((1, MODEL_DIM))
    _, key, *_ = layer.heads(x, attention.base.CallArguments())
    forget = np.exp(layer.gates(x)["log_decay"])
    np.testing.assert_allclose(key, 1 - forget, atol=1e-6)
    logits = np.asarray(layer.key(x)).ravel()
    bound = 1 / (1 + np.exp(-np.asarray(layer.bound[...])))
    expected = bound + (1 - bound) / (1 + np.exp(-logits))
    np.testing.assert_allclose(forget.ravel(), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["gla", "mlstm", "mamba2"])
def test_the_epsilon_of_the_norm_is_an_option(name):
    assert random_layer(name, norm_epsilon=0.5).norm.epsilon == 0.5
    assert random_layer(name).norm.epsilon == 1e-6


def test_an_activation_needs_an_output_gate():
    with pytest.raises(ValueError, match="gate_activation='silu' without a gate; set output_gate"):
        random_layer("deltanet", gate_activation="silu")
    assert random_layer("deltanet", output_gate="head").gate.kernel.shape[1] == 2


def test_rwkv7_has_no_other_gate():
    with pytest.raises(ValueError, match="output_gate: rwkv7 has a gate of its own"):
        random_layer("rwkv7", output_gate="head")
