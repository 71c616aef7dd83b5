"""Conformance suite of ops: properties by declared capability; formulas are tested per op.

Each op is compiled at most six times: on whole sequences with segments and padding as arrays, in
float64 and in float32; on a shorter sequence, mapped over the batch and recomputed in the backward
pass; in chunks; without options, in bfloat16; and on no tokens.
"""

from collections.abc import Callable, Collection
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import HeinsenAttentionState, l1
from tests.ops.catalogue import BATCH, LENGTH, OPS, Op

FIRST, SHORTER = 23, 67  # bounds of a sequence with padding on both sides, and its length
BORDERS = 0, 40, 41, 90, LENGTH
WHOLE = np.array([[0, LENGTH]] * BATCH)
ONE_SEGMENT = np.zeros((BATCH, LENGTH), np.int32)


# The short suite has the other direction, or an op that shares their code.
TWINS = {"l1, bidirectional", "softmax, xla, bidirectional", "mla, expanded, bidirectional"}
TWINS |= {"additive", "additive, bidirectional", "performer, relu"}
# Their own tests compare them with definitions, on segments, padding and chunks.
OWN = {"log_window", "performer", "performer, bidirectional", "taylor", "taylor, bidirectional"}
OWN |= {"gated, by head", "gated, by feature", "delta rule, by feature", "mla, expanded"}
OWN |= {"forgetting, xla", "dilated", "l1, bidirectional"}
SHORT = OPS.keys() - TWINS - OWN
# The others differ from one of these by a mask, or their tests have inputs as extreme.
SINGLE = {"linear", "l1", "softmax, xla", "softmax, tiled", "sliding_window", "tglobal", "rmt"}
SINGLE |= {"additive, window", "mla, absorbed", "memory_compressed", "linformer"}
SINGLE |= {"gated, by feature", "delta rule, by feature", "mlstm"}


def ops_with(condition: Callable[[Op], Any], short: Collection[str] = SHORT) -> Any:
    """Run a test for each of these ops.

    Ops that are not in `short` run nightly.
    """
    params = []
    for name, op in OPS.items():
        if condition(op):
            marks = [pytest.mark.nightly] * (name not in short)
            params.append(pytest.param(name, marks=marks))
    return pytest.mark.parametrize("name", params)


each_op = ops_with(lambda op: True)


@pytest.fixture(scope="module", autouse=True)
def small_tiles():
    """Tiles of L1 attention of about 48 tokens, several per sequence."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(l1, "SCORES", 1)
        yield


class Inputs(NamedTuple):
    arrays: tuple[Any, ...]
    constants: tuple[Any, ...]
    cotangent: Any


class Result(NamedTuple):
    y: np.ndarray
    arrays: tuple[np.ndarray, ...]
    """The gradients of these."""
    constants: tuple[np.ndarray, ...]
    state: Any


@cache
def draw(name: str, dtype: Any = np.float64) -> Inputs:
    op, rng = OPS[name], np.random.default_rng(0)
    arrays = [rng.standard_normal((BATCH, LENGTH, *shape)).astype(dtype) for shape in op.features]
    constants = [rng.standard_normal(shape).astype(dtype) / 2 for shape in op.constants]
    y = jax.eval_shape(op, arrays, constants)
    cotangent = rng.standard_normal(y.shape).astype(dtype)
    return Inputs(tuple(arrays), tuple(constants), cotangent)


def differentiate(function: Callable[..., Any], inputs: Inputs, *arguments: Any) -> Result:
    """`function(arrays, constants, *arguments)` returns an output and a state."""
    compute = partial(function, *arguments) if arguments else function
    y, pullback, state = jax.vjp(compute, inputs.arrays, inputs.constants, has_aux=True)
    return Result(y, *pullback(inputs.cotangent), state)


@cache
def compiled(name: str) -> Callable[..., Result]:
    """Compile the op on whole sequences, with all arguments that it supports."""
    op = OPS[name]

    @jax.jit
    def run(inputs: Inputs, segment_ids: Any, bounds: Any) -> Result:
        options = {"return_state": True} if op.state else {}
        options |= {"segment_ids": segment_ids} if op.has_segments else {}
        options |= {"key_value_seq_lengths": bounds} if op.padding else {}

        def function(arrays: Any, constants: Any) -> Any:
            result = op(arrays, constants, **options)
            return result if op.state else (result, None)

        return differentiate(function, inputs)

    return run


def run(name: str, inputs: Inputs, segment_ids: Any = ONE_SEGMENT, bounds: Any = WHOLE) -> Result:
    bounds = bounds[:, 1] if OPS[name].padding == "right" else bounds
    return jax.tree.map(np.asarray, compiled(name)(inputs, segment_ids, bounds))


@cache
def whole(name: str) -> Result:
    return run(name, draw(name))


@cache
def shorter(name: str, start: int) -> Result:
    """Compile the op on `SHORTER` tokens: without a batch axis, under `vmap`, rematerialized."""
    op, inputs = OPS[name], draw(name)
    tokens = slice(start, start + SHORTER)

    def function(arrays: Any, constants: Any) -> Any:
        options = {"return_state": True} if op.state else {}
        mapped = jax.vmap(lambda *arrays: op(arrays, constants, **options))
        result = jax.checkpoint(mapped)(*arrays)
        return result if op.state else (result, None)

    arrays = tuple(x[:, tokens] for x in inputs.arrays)
    part = inputs._replace(arrays=arrays, cotangent=inputs.cotangent[:, tokens])
    return jax.tree.map(np.asarray, jax.jit(partial(differentiate, function))(part))


def of_tokens(state: Any) -> Any:
    """Remove the total decay of a state, which not every call returns."""
    is_decayed = isinstance(state, HeinsenAttentionState)
    return (state.mean, state.log_z) if is_decayed else state


def assert_close(have: Any, want: Any, atol: float = 1e-10) -> None:
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=atol)


@ops_with(lambda op: op.is_causal)
@pytest.mark.usefixtures("x64")
def test_is_causal(name):
    """Values and gradients do not depend on later tokens."""
    inputs = draw(name)
    for last in (0, 47, 66, 129):
        cotangent = inputs.cotangent.copy()
        cotangent[:, last + 1 :] = 0
        other = tuple(np.concatenate([x[:, : last + 1], -x[:, last + 1 :]], 1) for x in inputs[0])
        result = run(name, inputs._replace(arrays=other, cotangent=cotangent))
        assert_close(result.y[:, : last + 1], whole(name).y[:, : last + 1], atol=1e-12)
        for gradient in result.arrays:
            np.testing.assert_array_equal(gradient[:, last + 1 :], 0)
        assert last == 0 or any(np.any(x[:, last] != 0) for x in result.arrays)


@ops_with(lambda op: not op.is_causal)
@pytest.mark.usefixtures("x64")
def test_is_bidirectional(name):
    """The first output depends on the last token."""
    inputs = draw(name)
    cotangent = inputs.cotangent.copy()
    cotangent[:, 1:] = 0
    gradients = run(name, inputs._replace(cotangent=cotangent)).arrays
    assert any(np.any(x[:, -1 - LENGTH % 5 :] != 0) for x in gradients)


@ops_with(lambda op: op.has_segments)
@pytest.mark.usefixtures("x64")
def test_segments_are_independent(name):
    """Values and gradients of each segment equal those of the segment alone, the rest being
    padding."""
    segment_ids = np.searchsorted(BORDERS, np.arange(LENGTH), side="right")
    segment_ids = np.stack([segment_ids * 70_000, 9 - segment_ids]).astype(np.int32)
    inputs = draw(name)
    packed = run(name, inputs, segment_ids)
    for start, stop in pairwise(BORDERS):
        if OPS[name].padding == "right" and start:
            continue
        bounds, part = np.array([[start, stop]] * BATCH), np.s_[:, start:stop]
        cotangent = np.zeros_like(inputs.cotangent)
        cotangent[part] = inputs.cotangent[part]
        alone = run(name, inputs._replace(cotangent=cotangent), bounds=bounds)
        assert_close(packed.y[part], alone.y[part])
        assert_close([x[part] for x in packed.arrays], [x[part] for x in alone.arrays])
        if stop == LENGTH:
            assert_close(of_tokens(packed.state), of_tokens(alone.state))


@ops_with(lambda op: op.padding)
@pytest.mark.usefixtures("x64")
def test_padding_has_no_effect(name):
    """With NaN at padding, outputs, gradients and state equal those of the tokens alone."""
    op, inputs = OPS[name], draw(name)
    start = FIRST if op.padding == "both" else 0
    part = np.s_[0, start : start + SHORTER]
    valid = np.zeros((BATCH, LENGTH), bool)
    valid[part] = True
    arrays, cotangent = [x.copy() for x in inputs.arrays], inputs.cotangent.copy()
    for x in arrays[op.first_masked :]:
        x[~valid] = np.nan
    cotangent[~valid] = 0
    bounds = np.array([[start, start + SHORTER], [0, 0]])
    padded = run(name, Inputs(tuple(arrays), inputs.constants, cotangent), bounds=bounds)
    expected = shorter(name, start)
    assert_close(padded.y[part], expected.y[0])
    assert_close([x[part] for x in padded.arrays], [x[0] for x in expected.arrays])
    for gradient in padded.arrays:
        np.testing.assert_array_equal(gradient[~valid], 0)
    for gradient in padded.constants if op.finite_constants else ():
        assert np.isfinite(gradient).all()
    if op.empty_row == "zero":
        np.testing.assert_array_equal(padded.y[1], 0)
    if op.state:
        states = of_tokens(padded.state), of_tokens(expected.state)
        rows = jax.tree.map(lambda x: x[0], states)
        assert_close(*rows)


@ops_with(lambda op: not op.padding)
@pytest.mark.usefixtures("x64")
def test_a_batch_equals_single_sequences(name):
    """Under `vmap` and `checkpoint`, which `test_padding_has_no_effect` has of the others."""
    assert_close(shorter(name, 0).y, whole(name).y[:, :SHORTER])


@ops_with(lambda op: op.state)
@pytest.mark.usefixtures("x64")
def test_streaming_equals_one_pass(name):
    """Compare values, gradients through the state, and the final state.

    A state continues the first segment of the next chunk, and is returned for the last.
    """
    op, inputs = OPS[name], draw(name)

    @jax.jit
    def in_chunks(inputs: Inputs, segment_ids: Any) -> Result:
        def function(arrays: Any, constants: Any) -> Any:
            state, parts = op.state((BATCH,), jnp.float64, *constants), []
            for start, stop in pairwise((0, 60, 60, LENGTH)):
                options = {"segment_ids": segment_ids[:, start:stop]} if op.has_segments else {}
                part = [x[:, start:stop] for x in arrays]
                y, state = op(part, constants, initial_state=state, return_state=True, **options)
                parts.append(y)
            return jnp.concatenate(parts, 1), state

        return differentiate(function, inputs)

    documents = np.searchsorted(BORDERS, np.arange(LENGTH), side="right").astype(np.int32)
    for ids in (ONE_SEGMENT, np.stack([documents] * BATCH))[: 1 + op.has_segments]:
        have, want = in_chunks(inputs, ids), run(name, inputs, ids)
        assert_close(have[:3], want[:3])
        assert_close(of_tokens(have.state), of_tokens(want.state))


@ops_with(lambda op: True, short=SINGLE)
def test_extreme_inputs_are_finite(name):
    inputs = draw(name, np.float32)
    for std in (0.0, OPS[name].largest):
        arrays = tuple(np.float32(std) * x for x in inputs.arrays)
        result = run(name, inputs._replace(arrays=arrays))
        for x in jax.tree.leaves(result[:3]):
            assert x.dtype == np.float32
            assert np.isfinite(x).all()


@ops_with(lambda op: True, short=SINGLE)
def test_half_precision(name):
    """Inputs and outputs are bfloat16; states are float32."""
    op, inputs = OPS[name], draw(name, np.float32)
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), inputs)
    forward = jax.jit(lambda inputs: op([x[None] for x in inputs.arrays], inputs.constants)[0])
    have = forward(half)  # with two batch axes
    assert have.dtype == jnp.bfloat16
    rounded = jax.tree.map(lambda x: np.asarray(x, np.float32), half)
    want = run(name, rounded).y
    rtol, atol = (0, op.half_error) if op.half_error else (2**-8, 1e-6)
    np.testing.assert_allclose(np.float32(have), want, rtol=rtol, atol=atol * np.abs(want).max())


@ops_with(lambda op: True, short=SINGLE)
@pytest.mark.usefixtures("x64")
def test_strict_promotion(name):
    """Dtypes are converted explicitly, also in gradients, with states and beside 64-bit types."""
    op, inputs = OPS[name], draw(name, np.float32)
    arrays, constants = jax.tree.map(
        lambda x: jnp.asarray(x, jnp.bfloat16), (inputs.arrays, inputs.constants)
    )
    options = {"segment_ids": ONE_SEGMENT} if op.has_segments else {}
    if op.state:
        state = op.state((BATCH,), jnp.float32, *constants)
        options |= {"initial_state": state, "return_state": True}

    def gradients(arrays: Any, constants: Any) -> Any:
        y, pullback = jax.vjp(partial(op, **options), arrays, constants)
        return pullback(y)

    with jax.numpy_dtype_promotion("strict"):
        jax.eval_shape(gradients, arrays, constants)


@each_op
def test_no_tokens(name):
    op, inputs = OPS[name], draw(name, np.float32)
    arrays = [x[:, :0] for x in inputs.arrays]
    options = {"return_state": True} if op.state else {}
    result = jax.jit(partial(op, **options))(arrays, inputs.constants)
    y, state = result if op.state else (result, None)
    assert y.shape == (BATCH, 0, *inputs.cotangent.shape[2:])
    if op.state:
        empty = op.state((BATCH,), jnp.float32, *inputs.constants)
        assert_close(of_tokens(state), of_tokens(empty))


@ops_with(lambda op: op.state)
@pytest.mark.parametrize(
    ("of_arrays", "of_state"), [(np.float64, np.float32), (np.float32, np.float64)]
)
@pytest.mark.usefixtures("x64")
def test_a_state_keeps_its_dtype(name, of_arrays, of_state):
    """Required for loops that carry states."""
    op, inputs = OPS[name], draw(name)
    arrays = [x[:, :7].astype(of_arrays) for x in inputs.arrays]
    constants = [x.astype(of_state) for x in inputs.constants]
    state = op.state((BATCH,), of_state, *constants)
    call = partial(op, initial_state=state, return_state=True)
    _, after = jax.eval_shape(call, arrays, constants)
    dtypes = [jax.tree.map(lambda x: x.dtype, x) for x in (state, after)]
    assert dtypes[0] == dtypes[1]


@each_op
def test_no_sequences(name):
    op, inputs = OPS[name], draw(name, np.float32)
    arrays = [x[:0] for x in inputs.arrays]

    def differentiate(arrays, constants):
        y, pullback = jax.vjp(op, arrays, constants)
        return y, pullback(y)

    y, (d_arrays, _) = jax.eval_shape(differentiate, arrays, inputs.constants)
    assert y.shape == inputs.cotangent[:0].shape
    assert [x.shape for x in d_arrays] == [x.shape for x in arrays]
