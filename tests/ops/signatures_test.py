"""Keywords mean the same in every op, and follow `jax.nn.dot_product_attention`."""

import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax import ops

PAGE = Path(__file__).resolve().parents[2] / "docs/reference/ops.md"
COLUMNS = {
    "is_causal": False,
    "scale": None,
    "mask": None,
    "bias": None,
    "segment_ids": None,
    "local_window_size": None,
    "query_seq_lengths": None,
    "key_value_seq_lengths": None,
}
"""Keywords, and their defaults in `jax.nn.dot_product_attention`, or in most ops."""


def parameters(name: str) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(getattr(ops, name)).parameters)


OPS = [
    name
    for name in ops.__all__
    if inspect.isfunction(getattr(ops, name))
    and {"query", "x"} & set(parameters(name))
    and {"key_value_seq_lengths", "edges", "segment_ids"} & set(parameters(name))
]


def row(name: str) -> str:
    """The row of an op in the table: a default, bold if it differs, or a dash."""
    given, cells = parameters(name), [f"`{name}`"]
    for keyword, default in COLUMNS.items():
        if keyword not in given:
            cells.append("–")
        elif given[keyword].default is inspect.Parameter.empty:
            cells.append("required")
        elif given[keyword].default == default:
            cells.append(f"{default}")
        else:
            cells.append(f"**{given[keyword].default}**")
    return f"| {' | '.join(cells)} |"


def test_the_table_has_the_keywords_of_every_op():
    text = PAGE.read_text()
    rows = re.findall(r"^\| `\w+` \|.*$", text, re.MULTILINE)
    assert rows == [row(name) for name in sorted(OPS)]


def test_defaults_are_those_of_jax():
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    for keyword, default in COLUMNS.items():
        assert keyword not in theirs or theirs[keyword].default == default


@pytest.mark.parametrize("name", sorted(OPS))
def test_names_are_shared(name):
    """No op has another word for a shared keyword."""
    others = {"causal", "softmax_scale", "attn_mask", "attention_mask", "lengths", "seq_lengths"}
    others |= {"window", "window_size", "sliding_window"}
    assert not others & set(parameters(name))


def test_a_window_is_a_number_of_tokens_or_a_pair():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 9, 2, 4)).astype(np.float32)
    for op in (ops.log_attention, ops.heinsen_attention, ops.sliding_window_attention):
        last = op(query, key, value, local_window_size=4)
        np.testing.assert_array_equal(op(query, key, value, local_window_size=(3, 0)), last)
    mixed = [
        ops.log_window_attention(query, key, value, query, key, local_window_size=window)
        for window in (4, (3, 0))
    ]
    np.testing.assert_array_equal(*mixed)
    pooled = ops.additive_pooling(value, value[..., 0], local_window_size=4)
    pair = ops.additive_pooling(value, value[..., 0], local_window_size=(3, 1))
    np.testing.assert_array_equal(pair, pooled)
    ours = ops.dot_product_attention(query, key, value, local_window_size=(3, 1))
    theirs = jax.nn.dot_product_attention(
        *map(jnp.asarray, (query, key, value)), local_window_size=(3, 1)
    )
    np.testing.assert_allclose(ours, theirs, atol=1e-6)
