"""Weights by PyTorch names: what must be refused. That they are right, models/ tests."""

import numpy as np
import pytest

from heinsen_jax.interop.torch import from_state_dict


def arrays(**changes):
    shapes = {
        "embed.weight": (11, 8),
        "embed_pos.dense.weight": (16, 8),
        "embed_pos.dense.bias": (16,),
        "layers.0.feedforward1.0.weight": (8,),
        "layers.0.feedforward1.0.bias": (8,),
        "layers.0.feedforward1.1.weight": (2 * (3 + 3 + 5), 8),
        "layers.0.feedforward1.1.bias": (22,),
        "layers.0.feedforward2.0.weight": (16, 10),
        "layers.0.feedforward2.0.bias": (16,),
        "layers.0.feedforward2.2.weight": (8, 8),
        "lnorm.weight": (8,),
        "lnorm.bias": (8,),
    }
    return {name: np.ones(shape, np.float32) for name, shape in shapes.items()} | changes


def test_sizes_follow_from_shapes():
    config = from_state_dict(arrays(), num_heads=2).config
    assert (config.key_depth, config.value_depth) == (3, 5)
    assert (config.vocab_size, config.model_dim, config.num_layers) == (11, 8, 1)


def test_a_missing_entry_is_named():
    without = arrays()
    del without["lnorm.bias"]
    with pytest.raises(ValueError, match=r"'lnorm\.bias' is missing"):
        from_state_dict(without, num_heads=2)


def test_an_unknown_entry_is_named():
    with pytest.raises(ValueError, match=r"'head\.weight' is not part of"):
        from_state_dict(arrays(**{"head.weight": np.ones(3)}), num_heads=2)


def test_a_misshapen_entry_is_named_with_its_shape():
    with pytest.raises(ValueError, match=r"'embed_pos\.dense\.weight' has shape \(15, 8\)"):
        from_state_dict(arrays(**{"embed_pos.dense.weight": np.ones((15, 8))}), num_heads=2)


def test_a_number_of_heads_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="num_heads=3 does not fit"):
        from_state_dict(arrays(), num_heads=3)
