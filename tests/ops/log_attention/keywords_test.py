"""Segments, padding, windows, decay and complex values, and their combinations."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from heinsen_jax.ops import (
    HeinsenAttentionState,
    LogAttentionState,
    heinsen_attention,
    log_attention,
)
from heinsen_jax.ops.log_attention import Chunked, chunked
from tests.ops.log_attention.cases import (
    FAST,
    IMPLEMENTATIONS,
    SCAN_NIGHTLY,
    assert_within,
    averages,
    in_float64,
)

BATCH, LENGTH, HEADS, GROUPS, KEY_DEPTH, VALUE_DEPTH = 2, 70, 2, 1, 3, 2
SEEDS = st.integers(0, 2**32 - 1)
each_fast = pytest.mark.parametrize("implementation", FAST)
each_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
but_scan = pytest.mark.parametrize("implementation", SCAN_NIGHTLY)
each_function = pytest.mark.parametrize("function", [log_attention, heinsen_attention])


def draw_arrays(seed: int, std: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> np.ndarray:
        return (std * rng.standard_normal((BATCH, *shape))).astype(np.float32)

    log_z = normal(GROUPS, KEY_DEPTH)
    log_s = log_z[..., None] + normal(GROUPS, KEY_DEPTH, VALUE_DEPTH)
    return {
        "query": normal(LENGTH, HEADS, KEY_DEPTH),
        "key": normal(LENGTH, GROUPS, KEY_DEPTH),
        "value": normal(LENGTH, GROUPS, VALUE_DEPTH),
        "initial_state": LogAttentionState(jnp.asarray(log_s), jnp.asarray(log_z)),
    }


def draw_keywords(names: tuple[str, ...], seed: int) -> dict[str, Any]:
    """Return random arguments; a name is a keyword of `log_attention` or a variant of one."""
    rng = np.random.default_rng(seed)
    keywords: dict[str, Any] = {}
    for name in names:
        if name == "segment_ids":
            keywords[name] = np.cumsum(rng.uniform(size=(BATCH, LENGTH)) < 0.1, 1)
        elif name == "padding on the right":
            keywords["key_value_seq_lengths"] = rng.integers(0, LENGTH + 1, BATCH)
        elif name == "padding on both sides":
            bounds = np.sort(rng.integers(0, LENGTH + 1, (BATCH, 2)), 1)
            keywords["key_value_seq_lengths"] = bounds
        elif name.startswith("decay"):
            shape = (BATCH, LENGTH, GROUPS, KEY_DEPTH)[: 3 if name == "decay per head" else 4]
            decay = -rng.exponential(rng.choice([0.01, 1, 30]), shape)
            decay[rng.uniform(size=shape) < 0.05] = rng.choice([0, -1e6, -np.inf])
            keywords["log_decay"] = decay.astype(np.float32)
    return keywords


@partial(jax.jit, static_argnames=("function", "implementation", "is_causal", "local_window_size"))
def differentiate(arrays, keywords, function, implementation, is_causal, local_window_size=None):
    """Return output, final state, and the gradients of a weighted sum of their finite elements."""
    windowed = local_window_size is not None

    def loss(arrays, decay):
        initial_state = None if windowed else arrays["initial_state"]
        if function is heinsen_attention and not windowed:
            initial_state = averages(initial_state)
        given = keywords if decay is None else keywords | {"log_decay": decay}
        result = function(
            *(arrays[name] for name in ("query", "key", "value")),
            is_causal=is_causal,
            local_window_size=local_window_size,
            initial_state=initial_state,
            return_state=not windowed,
            implementation=implementation,
            **given,
        )
        output, state = (result, None) if windowed else result
        leaves = [jnp.where(jnp.isfinite(x), x, 0) for x in jax.tree.leaves((output, state))]
        weighted = [x * jnp.cos(jnp.arange(x.size)).reshape(x.shape) for x in leaves]
        return sum(map(jnp.sum, weighted)), (output, state)

    gradient = jax.grad(loss, (0, 1), has_aux=True)
    gradients, (output, state) = gradient(arrays, keywords.get("log_decay"))
    return output, state, gradients


def assert_agrees(arrays, keywords, size: float, **static: Any) -> None:
    implementation = static.pop("implementation")
    actual = differentiate(arrays, keywords, implementation=implementation, **static)
    with jax.enable_x64(True):
        floats = {k: in_float64(x) if k == "log_decay" else x for k, x in keywords.items()}
        expected = differentiate(in_float64(arrays), floats, implementation="reference", **static)
        expected = jax.tree.map(np.asarray, expected)
    for have, want in zip(jax.tree.leaves(actual[:2]), jax.tree.leaves(expected[:2]), strict=True):
        finite = np.where(np.isneginf(want), 0, want)
        assert_within(have, want, 5e-6 * (1 + np.abs(finite) + size), "value")
    for have, want in zip(jax.tree.leaves(actual[2]), jax.tree.leaves(expected[2]), strict=True):
        assert_within(have, want, 5e-6 * (1 + size) * max(1, np.max(np.abs(want))), "gradient")


TOGETHER = [
    ("segment_ids",),
    ("padding on the right",),
    ("decay per head",),
    ("segment_ids", "padding on both sides", "decay per feature"),
]


@pytest.mark.parametrize(
    ("names", "function", "implementation"),
    [
        *((names, log_attention, "chunked") for names in TOGETHER[2:]),
        (TOGETHER[-1], log_attention, "scan"),
        *(
            pytest.param(names, log_attention, "scan", marks=pytest.mark.nightly)
            for names in TOGETHER[:-1]
        ),
        *(
            pytest.param(names, log_attention, "chunked", marks=pytest.mark.nightly)
            for names in TOGETHER[:2]
        ),
        *(
            pytest.param(TOGETHER[-1], heinsen_attention, name, marks=pytest.mark.nightly)
            for name in ("chunked", "scan")
        ),
    ],
)
@settings(max_examples=6)
@given(seed=SEEDS)
def test_causal(names, function, implementation, seed):
    arrays, keywords = draw_arrays(seed), draw_keywords(names, seed)
    static = {"function": function, "implementation": implementation, "is_causal": True}
    assert_agrees(arrays, keywords, 1.0, **static)


@pytest.mark.nightly
@each_fast
@pytest.mark.parametrize(
    ("names", "function"),
    [
        (("segment_ids",), log_attention),
        (("padding on both sides",), heinsen_attention),
        (("decay per feature",), log_attention),
    ],
)
@settings(max_examples=6)
@given(seed=SEEDS)
def test_bidirectional(names, function, implementation, seed):
    arrays, keywords = draw_arrays(seed), draw_keywords(names, seed)
    static = {"function": function, "implementation": implementation, "is_causal": False}
    assert_agrees(arrays, keywords, 1.0, **static)


@pytest.mark.parametrize(
    ("window", "function", "implementation"),
    [
        (16, log_attention, "chunked"),
        (1, heinsen_attention, "chunked"),
        *(
            pytest.param(window, log_attention, implementation, marks=pytest.mark.nightly)
            for window, implementation in [(1, "chunked"), (69, "chunked"), (16, "scan")]
        ),
    ],
)
def test_window(window, function, implementation):
    """Sizes around half a chunk, a chunk and the whole length."""
    static = {"function": function, "is_causal": True, "local_window_size": window}
    for seed in range(3):
        assert_agrees(draw_arrays(seed), {}, 1.0, implementation=implementation, **static)


@pytest.mark.nightly
@each_fast
@pytest.mark.parametrize("window", [20])
@settings(max_examples=6)
@given(seed=SEEDS)
def test_window_with_all_other_keywords(window, implementation, seed):
    names = ("segment_ids", "padding on both sides", "decay per feature")
    static = {"function": log_attention, "is_causal": True, "local_window_size": window}
    keywords = draw_keywords(names, seed)
    assert_agrees(draw_arrays(seed), keywords, 1.0, implementation=implementation, **static)


@pytest.mark.nightly
@each_fast
@pytest.mark.parametrize("std", [30.0, 1000.0])
@pytest.mark.parametrize("window", [None, 20])
def test_large_inputs(window, std, implementation):
    names = ("segment_ids", "padding on both sides", "decay per feature")
    static = {"function": log_attention, "is_causal": True, "local_window_size": window}
    for seed in range(3):
        keywords = draw_keywords(names, seed)
        arrays = draw_arrays(seed, std)
        assert_agrees(arrays, keywords, std, implementation=implementation, **static)


call = jax.jit(
    lambda arrays, keywords, function, implementation: function(
        *(arrays[name] for name in ("query", "key", "value")),
        return_state=True,
        implementation=implementation,
        **keywords,
    ),
    static_argnums=(2, 3),
)


@but_scan
@each_function
def test_packed_documents_equal_separate_ones(function, implementation):
    arrays = draw_arrays(0)
    borders = [0, 1, 2, 36, LENGTH]  # each length twice, for fewer compilations
    segment_ids = np.searchsorted(borders, np.arange(LENGTH), side="right")
    segment_ids = np.broadcast_to(10 - segment_ids, (BATCH, LENGTH))  # ids may be any integers
    packed, packed_state = call(arrays, {"segment_ids": segment_ids}, function, implementation)
    for start, stop in itertools.pairwise(borders):
        document = {name: arrays[name][:, start:stop] for name in ("query", "key", "value")}
        output, state = call(document, {}, function, implementation)
        assert_within(packed[:, start:stop], output, 5e-6)
    assert_within(packed_state.log_z, state.log_z, 5e-6)  # state of the last document
    have, want = (x.to_averages().mean for x in (packed_state, state))
    assert_within(have, want, 5e-6)
    assert np.isneginf(packed_state.log_decay).all()


@pytest.mark.parametrize(
    ("function", "implementation"),
    [
        (log_attention, "chunked"),
        pytest.param(log_attention, "reference", marks=pytest.mark.nightly),
        pytest.param(heinsen_attention, "scan", marks=pytest.mark.nightly),
    ],
)
def test_padding_of_any_value_equals_absence(function, implementation):
    start, stop = 13, 50
    arrays = draw_arrays(0)
    decay = -np.abs(arrays["key"])
    names = ("query", "key", "value")
    valid = {name: arrays[name][:, start:stop] for name in names}
    poisoned = {name: np.full_like(arrays[name], np.nan) for name in names}
    poisoned_decay = np.full_like(decay, np.nan)
    for name in names:
        poisoned[name][:, start:stop] = valid[name]
    poisoned_decay[:, start:stop] = decay[:, start:stop]
    lengths = np.full((BATCH, 2), [start, stop])

    @partial(jax.jit, static_argnames="padded")
    def value_and_gradients(arrays, decay, padded):
        def loss(arrays, decay):
            keywords = {"key_value_seq_lengths": lengths} if padded else {}
            output, state = function(
                *(arrays[name] for name in names),
                log_decay=decay,
                return_state=True,
                implementation=implementation,
                **keywords,
            )
            output = output[:, start:stop] if padded else output
            return jnp.sum(jnp.sin(output)) + jnp.sum(jnp.sin(state.log_z)), (output, state)

        return jax.grad(loss, (0, 1), has_aux=True)(arrays, decay)

    gradients, (output, state) = value_and_gradients(poisoned, poisoned_decay, True)
    expected_gradients, (expected, end) = value_and_gradients(valid, decay[:, start:stop], False)
    assert_within(output, expected, 5e-6)
    assert_within(state.log_z, end.log_z, 5e-6)
    assert_within(state.log_decay, end.log_decay, 5e-6 * 50)
    pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True)
    for have, want in pairs:
        assert_within(have[:, start:stop], want, 5e-6 * np.max(np.abs(want)))
        np.testing.assert_array_equal(have[:, :start], 0)
        np.testing.assert_array_equal(have[:, stop:], 0)


@pytest.mark.nightly
@each_implementation
@pytest.mark.parametrize("is_causal", [True, False])
def test_complex_log_values_are_values_of_either_sign(implementation, is_causal):
    arrays = draw_arrays(0)
    value = arrays["value"]
    value[:, 5] = 0
    first, second = ({k: arrays[k][:, part] for k in ("query", "key")} for part in np.s_[:30, 30:])

    @jax.jit
    def by_logs(value):
        log_value = jnp.log(value.astype(jnp.complex64))
        options = {"is_causal": is_causal, "implementation": implementation, "return_state": True}
        _, state = log_attention(first["query"], first["key"], log_value[:, :30], **options)
        options["initial_state"] = state
        log_y, state = log_attention(second["query"], second["key"], log_value[:, 30:], **options)
        return jnp.exp(log_y).real, jnp.exp(log_y).imag, state

    @jax.jit
    def directly(value):
        options = {"is_causal": is_causal, "implementation": implementation, "return_state": True}
        _, state = heinsen_attention(first["query"], first["key"], value[:, :30], **options)
        options["initial_state"] = state
        return heinsen_attention(second["query"], second["key"], value[:, 30:], **options)

    y, imaginary, state = by_logs(value)
    expected, end = directly(value)
    assert_within(y, expected, 5e-6)
    assert_within(imaginary, 0 * expected, 1e-6)
    assert_within(averages(state).mean, end.mean, 5e-6)
    value = np.where(value == 0, 0.1, value)  # log has no derivative at 0
    gradient = jax.grad(lambda value: jnp.sum(jnp.sin(by_logs(value)[0])))(value)
    expected = jax.grad(lambda value: jnp.sum(jnp.sin(directly(value)[0])))(value)
    assert_within(gradient, expected, 2e-5 * np.max(np.abs(expected)))


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@each_implementation
def test_half_precision_inputs_have_float32_states(dtype, implementation):
    """Half-precision inputs are computed in float32; in the chunked form, if configured."""
    implementation = (
        Chunked(matmul_dtype="float32") if implementation == "chunked" else implementation
    )
    arrays = draw_arrays(0)
    arrays = {name: jnp.asarray(arrays[name], dtype) for name in ("query", "key", "value")}
    output, state = call(arrays, {}, log_attention, implementation)
    in_float32 = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    expected, end = call(in_float32, {}, log_attention, implementation)
    assert output.dtype == dtype
    np.testing.assert_array_equal(output, expected.astype(dtype))
    for have, want in zip(jax.tree.leaves(state), jax.tree.leaves(end), strict=True):
        assert have.dtype == jnp.float32
        np.testing.assert_array_equal(have, want)


NOTHING = jnp.zeros((2, 0, 1, 3))


@pytest.mark.nightly
@each_implementation
@each_function
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("name", ["segment_ids", "log_decay"])
def test_no_tokens_leave_the_state_unchanged(function, implementation, is_causal, name):
    keyword = jnp.zeros((2, 0), int) if name == "segment_ids" else jnp.zeros((2, 0, 1))
    kind = LogAttentionState if function is log_attention else HeinsenAttentionState
    output, after = function(
        *[NOTHING] * 3,
        is_causal=is_causal,
        initial_state=kind(jnp.ones((2, 1, 3, 3)), jnp.ones((2, 1, 3))),
        return_state=True,
        implementation=implementation,
        **{name: keyword},
    )
    assert output.shape == NOTHING.shape
    np.testing.assert_array_equal(after.log_z, 1)
    assert_within(jax.tree.leaves(after)[0], np.ones((2, 1, 3, 3)), 1e-6)


@each_implementation
@each_function
def test_a_window_over_no_tokens(function, implementation):
    output = function(*[NOTHING] * 3, local_window_size=4, implementation=implementation)
    assert output.shape == NOTHING.shape


@each_implementation
@each_function
def test_no_sequences(function, implementation):
    x = jnp.zeros((0, 5, 1, 3))
    keywords: Any = {"segment_ids": jnp.zeros((0, 5), int), "implementation": implementation}
    assert jax.grad(lambda x: jnp.sum(function(x, x, x, **keywords)))(x).shape == x.shape
    y, state = function(x, x, x, is_causal=False, return_state=True, implementation=implementation)
    assert y.shape == x.shape
    assert state.log_z.shape == (0, 1, 3)


def test_padding_extends_no_range_of_log_values(monkeypatch):
    """Otherwise the fast tier could not be used if log-values are far from 0."""
    ranges, measure = [], chunked.log_value_range

    def measured(*arrays):
        span, scale = measure(*arrays)
        jax.debug.callback(lambda *x: ranges.append(x), span, scale)
        return span, scale

    monkeypatch.setattr(chunked, "log_value_range", measured)
    x = jnp.zeros((37, 1, 3))  # a shape that no other test compiles
    log_attention(x, x, x - 300, key_value_seq_lengths=jnp.int32(5), implementation="chunked")
    jax.effects_barrier()
    (span, scale) = ranges[0]
    assert span == 0
    np.testing.assert_array_equal(scale, -300)
