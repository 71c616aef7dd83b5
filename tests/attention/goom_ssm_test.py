"""The state-space model equals its authors' code, also where its states exceed float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax import attention

NAMES = {
    "A": "transition",
    "B": "input.kernel",
    "C": "readout.kernel",
    "D": "skip.kernel",
    "init_states": "initial",
    "feedfwd": "output.kernel",
}
"""Parameters by their names in the original; `feedfwd` is transposed."""


def variable(layer: attention.Attention, name: str) -> nnx.Variable:
    for part in NAMES[name].split("."):
        layer = getattr(layer, part)
    return layer


@pytest.mark.parametrize("gain", ["0.99", "4"])
def test_published_layer(golden, x64, gain):
    """A gain of 4 leads to states near 4^70."""
    case = golden("goom_ssm")
    heads, depth = case["param/init_states"].shape
    layer = attention.build(
        "goom_ssm",
        model_dim=len(case["param/B"]),
        num_heads=heads,
        state_depth=depth,
        param_dtype=jnp.float64,
        rngs=nnx.Rngs(0),
    )
    for name in NAMES:
        given = case[f"gain{gain}/param/A" if name == "A" else f"param/{name}"]
        variable(layer, name)[...] = given.T if name == "feedfwd" else given
    x, cotangent = case[f"gain{gain}/u"], case[f"gain{gain}/cotangent"]
    y, state = layer(x, return_state=True)
    np.testing.assert_allclose(y, case[f"gain{gain}/y"], atol=1e-10)
    following = layer(case[f"gain{gain}/next/u"], state=state)
    np.testing.assert_allclose(following, case[f"gain{gain}/next/y"], atol=1e-10)

    def loss(layer: attention.Attention, x: jax.Array) -> jax.Array:
        return jnp.sum(layer(x) * cotangent)

    gradients, x_gradient = nnx.grad(loss, argnums=(0, 1))(layer, x)
    np.testing.assert_allclose(x_gradient, case[f"gain{gain}/du"], atol=1e-8)
    for name in NAMES:
        have, want = variable(gradients, name)[...], case[f"gain{gain}/grad/{name}"]
        want = want.T if name == "feedfwd" else want
        np.testing.assert_allclose(have, want, atol=1e-9 * np.abs(want).max(), err_msg=name)
