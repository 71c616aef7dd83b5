"""FLOPs of mechanisms follow from their configurations and sizes, without a layer."""

import pytest

from heinsen_jax.attention import configure, names

LENGTH = 512
CAUSAL = 65664.0  # a query of 4 heads of 16 features attends to 256.5 keys on average
FLOPS = {
    "log": 4096.0,
    **dict.fromkeys(("softmax", "gqa", "fox", "l1"), CAUSAL),
    "mla": 82080.0,
    "sliding_window": 49152.0,
    "dilated": 12352.0,
    "block_sparse": 15488.0,
    "linformer": 32768.0,
    "linear": 4096.0,
    "performer": 11520.0,
    "taylor": 11520.0,
    "l1_sparse": 5120.0,
    "retnet": 8192.0,
    "gla": 2048.0,
    "hgrn2": 4096.0,
    "mamba2": 65536.0,
    "deltanet": 6144.0,
    "gated_deltanet": 6912.0,
    "kda": 6144.0,
    "mlstm": 2048.0,
    "log_window": 23568.0,
    "goom_ssm": 2048.0,
    "short_convolution": 0.0,
    "gated_deltaproduct": 11520.0,
    "gated_deltanet2": 6144.0,
    "rwkv7": 6144.0,
}
"""For 512 tokens, 4 heads and a width of 64."""


@pytest.mark.parametrize("name", names())
def test_flops_of_defaults(name):
    assert configure(name).flops(64, 4, LENGTH) == FLOPS.get(name)


@pytest.mark.parametrize(
    ("name", "visible"),
    [
        ("softmax", LENGTH),
        ("sliding_window", 384.0),  # 511 in the middle, 256 at the ends
        ("dilated", 96.0),
        ("l1_sparse", 39),  # 15 on each side, and 4 at doubling distances
    ],
)
def test_flops_of_all_pairs(name, visible):
    """A query attends to keys on both sides."""
    flops = configure(name).flops(64, 4, LENGTH, is_causal=False)
    assert flops == pytest.approx(4 * 4 * 16 * visible, rel=0.01)


def test_mechanisms_in_parallel_add_their_flops():
    assert configure("gqa+mamba2").flops(64, 4, LENGTH) == FLOPS["gqa"] + FLOPS["mamba2"]
    assert configure("gqa+additive").flops(64, 4, LENGTH) is None
