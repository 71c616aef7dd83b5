"""The interface of mechanisms refuses capabilities that are not declared."""

import inspect
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.attention import Attention, AttentionConfig, configure
from heinsen_jax.errors import UserError
from tests.attention.small import MODEL_DIM, random_layer

X = jnp.zeros((3, MODEL_DIM))


@pytest.mark.parametrize(
    ("name", "arguments", "missing"),
    [
        ("linformer", {"is_causal": True}, "causal"),
        ("block_sparse", {"is_causal": False}, "bidirectional"),
        ("block_sparse", {"source": X}, "cross"),
        ("block_sparse", {"segment_ids": jnp.zeros(3, int)}, "segments"),
        ("colt5", {"return_state": True, "is_causal": False}, "streaming"),
    ],
)
def test_an_undeclared_capability_is_refused(name, arguments, missing):
    with pytest.raises(NotImplementedError, match=f"no capability '{missing}'; it has "):
        random_layer(name)(X, **arguments)


def test_capabilities_may_need_a_configuration():
    @dataclass(frozen=True, kw_only=True)
    class Config(AttentionConfig):
        size: int

    class Mechanism(Attention[Config, None]):
        pass

    Mechanism.Config = Config
    assert not hasattr(Mechanism, "capabilities")
    assert inspect.getmembers(Mechanism)


@pytest.mark.parametrize("name", ["goom_ssm", "gated_deltanet", "softmax"])
@pytest.mark.parametrize(("given", "batch"), [((), (4,)), ((1,), (4,)), ((4,), ())])
def test_a_state_of_other_sequences_is_refused(name, given, batch):
    """A few mechanisms would broadcast it."""
    layer, x = random_layer(name), jnp.zeros((*batch, 3, MODEL_DIM))
    state = layer.init_state(given, capacity=8)
    with pytest.raises(ValueError, match=r"state: an array has shape \[.* but x has batch axes"):
        layer(x, state=state)


@pytest.mark.parametrize("name", ["goom_ssm", "deltanet", "log"])
def test_segments_of_another_shape_are_refused(name):
    with pytest.raises(ValueError, match=r"segment_ids must have shape \(2, 3\)"):
        random_layer(name)(jnp.zeros((2, 3, MODEL_DIM)), segment_ids=jnp.zeros(3, int))


@pytest.mark.parametrize("name", ["softmax", "mla", "hgrn2", "mlstm", "rmt", "rwkv7", "mamba2"])
def test_weights_of_a_wider_dtype_are_not_rounded(name):
    layer = random_layer(name)
    x = jnp.linspace(-1, 1, 5 * MODEL_DIM, dtype=jnp.bfloat16).reshape(5, MODEL_DIM)
    sources = [{}, {"source": x}] if layer.capabilities.cross else [{}]
    for options in sources:
        y = layer(x, **options)
        assert y.dtype == jnp.float32
        wide = {option: x.astype(jnp.float32) for option in options}
        np.testing.assert_array_equal(y, layer(x.astype(jnp.float32), **wide))


@pytest.mark.parametrize("name", ["linear", "mlstm", "mamba2"])
def test_layers_are_tabulated(name):
    assert "kernel" in nnx.tabulate(random_layer(name), X)


def test_sizes_of_tglobal_are_checked_early():
    with pytest.raises(UserError, match="less than twice max_distance=16"):
        configure("tglobal", max_distance=16)


def test_another_width_is_refused():
    with pytest.raises(ValueError, match=r"x .* must have width model_dim=8"):
        random_layer("softmax")(jnp.zeros((3, 7)))
