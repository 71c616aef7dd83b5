"""The interface of mechanisms refuses capabilities that are not declared."""

import inspect
from dataclasses import dataclass

import jax.numpy as jnp
import pytest

from heinsen_jax.attention import Attention, AttentionConfig
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
@pytest.mark.parametrize(("given", "batch"), [((), (4,)), ((1,), (4,))])
def test_a_state_of_other_sequences_is_refused(name, given, batch):
    """A few mechanisms would broadcast it."""
    layer, x = random_layer(name), jnp.zeros((*batch, 3, MODEL_DIM))
    state = layer.init_state(given, capacity=8)
    with pytest.raises(ValueError, match=r"state: an array has shape \[.* but x has batch axes"):
        layer(x, state=state)


def test_another_width_is_refused():
    with pytest.raises(ValueError, match=r"x .* must have width model_dim=8"):
        random_layer("softmax")(jnp.zeros((3, 7)))
