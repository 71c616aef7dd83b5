"""The interface of mechanisms refuses capabilities that are not declared."""

import jax.numpy as jnp
import pytest

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


def test_another_width_is_refused():
    with pytest.raises(ValueError, match=r"x .* must have width model_dim=8"):
        random_layer("softmax")(jnp.zeros((3, 7)))
