"""Errors of invalid calls; equal calls are compiled once."""

import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import (
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)
from heinsen_jax.ops.log_attention import call

each_function = pytest.mark.parametrize("function", [log_attention, heinsen_attention])


def arrays(query=(4, 2, 3), key=(4, 2, 3), value=(4, 2, 5)):
    return [jnp.zeros(shape) for shape in (query, key, value)]


STATE = LogAttentionState.empty((), 2, 3, 5)
STATES = {log_attention: LogAttentionState, heinsen_attention: HeinsenAttentionState}


@each_function
@pytest.mark.parametrize(
    ("shapes", "keywords", "message"),
    [
        (
            {"query": (4, 3)},
            {},
            r"query must be \[\.\.\., tokens, heads, depth\], got shape \(4, 3\)",
        ),
        ({"key": (4, 3)}, {}, "key must be"),
        ({"value": (4, 3)}, {}, "value must be"),
        ({"query": (7, 4, 2, 3)}, {}, r"batch axes .* query \(7, 4, 2, 3\)"),
        ({"value": (3, 2, 5)}, {}, "same tokens and heads"),
        ({"value": (4, 1, 5)}, {}, "same tokens and heads"),
        ({"query": (4, 2, 9)}, {}, "query and key must have the same depth"),
        ({"query": (4, 3, 3)}, {}, "num_heads 3 must be a multiple of num_kv_heads 2"),
        ({"key": (4, 0, 3), "value": (4, 0, 5)}, {}, "must be a multiple of num_kv_heads 0"),
        ({"query": (5, 2, 3)}, {}, "causal attention needs as many queries as keys"),
        ({}, {"implementation": "fast"}, r"None or one of \[.*\], not 'fast'"),
        ({}, {"initial_state": ((1,), 2, 3, 5)}, "does not fit a state"),
        ({}, {"initial_state": ((), 1, 3, 5)}, "does not fit a state"),
        ({}, {"initial_state": ((), 2, 4, 5)}, "does not fit a state"),
        ({}, {"initial_state": ((), 2, 3, 4)}, "value of shape .* does not"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(function, shapes, keywords, message):
    if "initial_state" in keywords:
        keywords = {"initial_state": STATES[function].empty(*keywords["initial_state"])}
    with pytest.raises(ValueError, match=message):
        function(*arrays(**shapes), **keywords)


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.usefixtures("unchecked")
def test_integers_are_refused(position):
    inputs = arrays()
    inputs[position] = inputs[position].astype(jnp.int32)
    name = ("query", "key", "log_value")[position]
    with pytest.raises(ValueError, match=f"{name} must be floating point, got int32"):
        log_attention(*inputs)


@each_function
@pytest.mark.usefixtures("unchecked")
def test_the_state_of_the_other_function_is_refused(function):
    kind = HeinsenAttentionState if function is log_attention else LogAttentionState
    with pytest.raises(ValueError, match=f"initial_state must be a .*, got a {kind.__name__}"):
        function(*arrays(), initial_state=kind.empty((), 2, 3, 5))


def test_real_log_values_refuse_a_complex_state():
    with pytest.raises(ValueError, match=r"initial_state\.log_s is complex"):
        log_attention(*arrays(), initial_state=LogAttentionState.empty((), 2, 3, 5, jnp.complex64))


@each_function
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"local_window_size": 2, "is_causal": False},
            "local_window_size: unsupported with is_causal=False",
        ),
        (
            {"local_window_size": 2, "initial_state": STATE},
            "local_window_size: unsupported with initial_state",
        ),
        (
            {"local_window_size": 2, "return_state": True},
            "local_window_size: unsupported with .*return_state",
        ),
        (
            {"segment_ids": jnp.zeros(4, int), "log_decay": -jnp.ones((4, 2)), "is_causal": False},
            "segment_ids: unsupported with log_decay and is_causal=False",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_unsupported_combinations_raise(function, keywords, message):
    with pytest.raises(NotImplementedError, match=message):
        function(*arrays(), **keywords)


@each_function
def test_segments_of_other_queries(function):
    query = jnp.ones((7, 2, 3))
    with pytest.raises(NotImplementedError, match="different numbers of queries and keys"):
        function(query, *arrays()[1:], segment_ids=jnp.zeros(4, int), is_causal=False)


@each_function
@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"local_window_size": 0}, "local_window_size must be an integer >= 1 or a pair, got 0"),
        (
            {"local_window_size": 2.0},
            "local_window_size must be an integer .* a pair, got 2.0",
        ),
        ({"segment_ids": jnp.zeros(3, int)}, r"segment_ids must have shape \(4,\), got \(3,\)"),
        ({"segment_ids": jnp.ones(4)}, "segment_ids must have a dtype of kind .*, got float32"),
        (
            {"key_value_seq_lengths": jnp.zeros(3, int)},
            r"key_value_seq_lengths must have shape \(\) or \(2,\), got \(3,\)",
        ),
        (
            {"key_value_seq_lengths": jnp.float32(2)},
            "key_value_seq_lengths must have a dtype of kind",
        ),
        ({"log_decay": jnp.ones(4)}, r"log_decay must have shape \(4, 2\) or .*, got \(4,\)"),
        ({"log_decay": jnp.zeros((4, 2), int)}, "log_decay must have a dtype of kind floating"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_keywords_raise(function, keywords, message):
    with pytest.raises(ValueError, match=message):
        function(*arrays(), **keywords)


def test_equal_calls_are_compiled_once():
    """Outside `jit`, where the rest of a call needs a thousandth of its compilation time."""
    query, key, log_value = np.random.default_rng(0).standard_normal((3, 1, 11, 2, 3), np.float32)
    log_attention(query, key, log_value)
    compiled = call.attend._cache_size()
    log_attention(query + 1, key, log_value)
    assert call.attend._cache_size() == compiled
    log_attention(query, key, log_value, is_causal=False)
    assert call.attend._cache_size() == compiled + 1
