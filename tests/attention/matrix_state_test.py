"""Initial values of mechanisms whose state is a matrix per head."""

import jax
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention

RATES = {"exp(to_log_decay.log_rate)": (1, 16), "softplus(to_log_decay.bias)": (1e-3, 0.1)}
RANGES = {
    "gated_deltanet": RATES,
    "kda": RATES,
    "mamba2": RATES | {"skip": (1, 1), "convolutions.0.bias": (0, 0), "norm.scale": (1, 1)},
    "mlstm": {"forget_gate.bias": (3, 6), "input_gate.bias": (0, 0), "norm_scale": (1, 1)},
    "hgrn2": {"sigmoid(bound)": (0.3, 0.3)},
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
        assert value.min() >= low * (1 - 1e-5)
        assert value.max() <= high * (1 + 1e-5)
        assert value.max() - value.min() >= 0.7 * (high - low)


@pytest.mark.parametrize("name", ["retnet", "gla", "mamba2"])
def test_default_widths_are_published_multiples(name):
    layer = nnx.eval_shape(
        lambda: attention.build(name, model_dim=64, num_heads=4, rngs=nnx.Rngs(0))
    )
    depths = {"retnet": (16, 32), "gla": (8, 16), "mamba2": (128, 32)}
    assert (layer.key_depth, layer.value_depth) == depths[name]
