"""`log_window_attention` against its dense definition in float64."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops import Chunked, LogWindowState, log_window_attention
from heinsen_jax.ops.log_attention import mosaic

BATCH, LENGTH, HEADS, GROUPS = 2, 71, 4, 2
KEY, VALUE, FEATURES, WINDOW = 3, 2, 5, 9
ARRAYS = (HEADS, KEY), (GROUPS, KEY), (GROUPS, VALUE), (HEADS, FEATURES), (GROUPS, FEATURES)
BORDERS = 20, 21, 27, 50
SEGMENTS = np.searchsorted(BORDERS, np.arange(LENGTH), side="right")
SEGMENTS = np.stack([SEGMENTS * 70_000, 9 - SEGMENTS]).astype(np.int32)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """Multiply float32 in full precision: GPUs would use TF32 for scores and values of a window."""
    with jax.default_matmul_precision("float32"):
        yield


def draw(
    length: int = LENGTH, std: float = 1.0, *, has_decay: bool = True
) -> tuple[np.ndarray, ...]:
    """Return query, key, value, query_features, key_features, log_weight and, unless excluded,
    log_decay."""
    rng = np.random.default_rng(0)
    shapes = *ARRAYS, (HEADS,)
    arrays = tuple(std * rng.standard_normal((BATCH, length, *shape)) for shape in shapes)
    log_decay = -0.2 * rng.exponential(size=(BATCH, length, GROUPS))
    return (*arrays, log_decay) if has_decay else arrays


def dense(*arrays: Any, window_size: int, segment_ids: Any = None) -> Any:
    """The definition: one softmax over the scores of both kinds."""
    query, _, _, query_features, _, log_weight, *log_decay = arrays
    key, value, key_features = (
        jnp.repeat(x, HEADS // GROUPS, 2) for x in arrays[1:3] + arrays[4:5]
    )
    near = jnp.einsum("btnk,bsnk->btsn", query, key) / np.sqrt(KEY)
    terms = query_features[:, :, None] + key_features[:, None]
    far = jax.nn.logsumexp(terms, -1) + log_weight[:, :, None]
    token = np.arange(query.shape[1])
    if log_decay:
        total = jnp.cumsum(jnp.repeat(*log_decay, HEADS // GROUPS, 2), 1)
        edge = np.maximum(token - window_size, 0)  # the last token outside the window
        far += total[:, edge, None] - total[:, None]
    behind = (token[:, None] - token)[None, :, :, None]
    visible = behind >= 0
    if segment_ids is not None:
        visible = visible & (segment_ids[:, :, None] == segment_ids[:, None])[..., None]
    is_near = np.broadcast_to(behind < window_size, near.shape)
    scores = jnp.where(
        np.broadcast_to(visible, near.shape), jnp.where(is_near, near, far), -jnp.inf
    )
    return jnp.einsum("btsn,bsnv->btnv", jax.nn.softmax(scores, 2), value)


def ours(*arrays: Any, window_size: int = WINDOW, **options: Any) -> Any:
    options |= dict(zip(("log_weight", "log_decay"), arrays[5:], strict=False))
    options["local_window_size"] = window_size
    return log_window_attention(*arrays[:5], **options)


def differentiate(function: Callable[..., Any], arrays: Any, *, has_aux: bool = False) -> Any:
    """Return the output, gradients and, if any, the auxiliary output, compiled together."""

    @jax.jit
    def compiled(*arrays: Any) -> Any:
        y, pullback, *aux = jax.vjp(function, *arrays, has_aux=has_aux)
        return y, pullback(jnp.sin(1 + y)), *aux

    return compiled(*arrays)


def assert_close(have: Any, want: Any, **tolerance: Any) -> None:
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-10}
    for a, b in zip(jax.tree.leaves(have), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, **tolerance)


@pytest.mark.parametrize(
    ("length", "window_size", "implementation", "has_decay"),
    [
        (LENGTH, WINDOW, None, False),
        (LENGTH, WINDOW, None, True),
        (LENGTH, 1, Chunked(chunk_size=16, block_size=32), True),
        (LENGTH, LENGTH - 1, None, True),  # a single query has an earlier token
        (7, 300, None, True),
        (301, 140, "chunked", False),  # scores of the window in tiles
        pytest.param(30, 7, "scan", True, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.usefixtures("x64")
def test_values_and_gradients_equal_the_definition(length, window_size, implementation, has_decay):
    arrays = draw(length, has_decay=has_decay)
    have = partial(ours, window_size=window_size, implementation=implementation)
    want = differentiate(partial(dense, window_size=window_size), arrays)
    assert_close(differentiate(have, arrays), want)


@pytest.mark.parametrize("has_decay", [False, True])
@pytest.mark.usefixtures("x64")
def test_segments_are_independent(has_decay):
    arrays = draw(has_decay=has_decay)
    options = {"window_size": WINDOW, "segment_ids": SEGMENTS}
    want = differentiate(partial(dense, **options), arrays)
    assert_close(differentiate(partial(ours, **options), arrays), want)


def state_after(*arrays: Any, segment_ids: Any = None) -> LogWindowState:
    return jax.jit(partial(ours, segment_ids=segment_ids, return_state=True))(*arrays)[1]


def in_chunks(*arrays: Any, bounds: tuple[int, ...], segment_ids: Any = None) -> Any:
    """Return the outputs of consecutive chunks, and the state after them."""
    parts, state = [], None
    for start, stop in pairwise(bounds):
        ids = None if segment_ids is None else segment_ids[:, start:stop]
        chunk = (x[:, start:stop] for x in arrays)
        y, state = ours(*chunk, segment_ids=ids, initial_state=state, return_state=True)
        parts.append(y)
    return jnp.concatenate(parts, 1), state


@pytest.mark.parametrize(
    ("segment_ids", "has_decay"),
    [
        pytest.param(None, False, marks=pytest.mark.nightly),
        pytest.param(None, True, marks=pytest.mark.nightly),
        (SEGMENTS, True),
    ],
)
@pytest.mark.usefixtures("x64")
def test_streaming_equals_one_pass(segment_ids, has_decay):
    """In chunks shorter and longer than the window; the gradients flow through the states."""
    arrays = draw(has_decay=has_decay)

    def stream(*arrays: Any) -> Any:
        return in_chunks(*arrays, bounds=(0, 5, 6, 38, 39, LENGTH), segment_ids=segment_ids)

    *have, state = differentiate(stream, arrays, has_aux=True)
    whole = partial(dense, window_size=WINDOW, segment_ids=segment_ids)
    assert_close(have, differentiate(whole, arrays))
    assert_close(state, state_after(*arrays, segment_ids=segment_ids))


@pytest.mark.usefixtures("x64")
def test_a_state_of_few_tokens_after_a_segment_has_no_others():
    """The last segment is shorter than the window."""
    arrays = tuple(x[:, :25] for x in draw())
    packed = state_after(*arrays, segment_ids=SEGMENTS[:, :25])
    alone = state_after(*(x[:, 21:] for x in arrays))
    assert_close(packed, alone)
    assert packed.num_tokens.tolist() == [[4] * GROUPS] * BATCH


@pytest.mark.parametrize("has_decay", [pytest.param(False, marks=pytest.mark.nightly), True])
@pytest.mark.usefixtures("x64")
def test_states_merge(has_decay):
    arrays = draw(has_decay=has_decay)
    _, key, value, _, features, _, *decay = arrays
    first = np.array([3, 0])

    def state_of(start: int, stop: int, first: Any = None) -> LogWindowState:
        chunk = (x[:, start:stop] for x in (key, value, features, *decay))
        return LogWindowState.of_tokens(*chunk, local_window_size=WINDOW, first=first)

    @jax.jit
    def merged() -> list[LogWindowState]:
        sizes = GROUPS, KEY, VALUE, FEATURES, WINDOW
        state = LogWindowState.empty((BATCH,), *sizes, jnp.float64, has_decay=has_decay)
        for bounds in pairwise((0, 29, 31, 31, 36, 42, LENGTH)):
            state = state.merge(state_of(*bounds))
        return [state, state_of(0, 36).merge(state_of(36, 42)).merge(state_of(42, LENGTH))]

    for state in merged():
        assert_close(state, state_after(*arrays))
    segments = np.where(np.arange(LENGTH)[None] < first[:, None], 1, 0)
    last = state_after(*arrays, segment_ids=segments)
    assert_close(jax.jit(partial(state_of, 0, LENGTH))(first), last)


@pytest.mark.usefixtures("x64")
def test_a_decay_of_zero_excludes_the_tokens_before_it():
    arrays = draw()
    before, after = 20, 20 + WINDOW  # the token with the decay, and when it has left the window
    arrays[6][:, before] = -np.inf
    stream = jax.jit(lambda *arrays: in_chunks(*arrays, bounds=(0, 15, 40, LENGTH))[0])
    whole, chunks = jax.jit(ours)(*arrays), stream(*arrays)
    alone = jax.jit(ours)(*(x[:, before:] for x in arrays))
    for y in (whole, chunks):
        assert_close(y[:, after:], alone[:, WINDOW:])
        assert np.max(np.abs(y[:, after - 1] - alone[:, WINDOW - 1])) > 1e-3


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(
    ("slope", "has_decay"),
    [
        pytest.param(3.0, False, marks=pytest.mark.nightly),
        pytest.param(-3.0, False, marks=pytest.mark.nightly),
        (3.0, True),
    ],
)
def test_large_scores_and_rising_keys(slope, has_decay):
    """Keys change by some nats per token, so that products of exponentials would overflow. Decays
    of as much would underflow."""
    arrays = [np.float32(x) for x in draw(300, 10.0, has_decay=has_decay)]
    if has_decay:
        arrays[6] = 15 * arrays[6]  # -3 in the mean
    rise = np.float32(slope) * np.arange(300, dtype=np.float32)
    arrays[4] = arrays[4] + rise[None, :, None, None]
    arrays[5] = arrays[5] - rise[None, :, None]
    have = differentiate(jax.jit(ours), arrays)
    with jax.enable_x64(True):
        exact = [np.float64(x) for x in arrays]
        want = jax.tree.map(np.asarray, differentiate(partial(dense, window_size=WINDOW), exact))
    streamed, _ = in_chunks(*arrays, bounds=(0, 4, 152, 300))
    np.testing.assert_allclose(streamed, want[0], rtol=0, atol=2e-3)
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(have))
    np.testing.assert_allclose(have[0], want[0], rtol=0, atol=2e-3)
    for a, b in zip(have[1], want[1], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-3 * np.max(np.abs(b)))


@pytest.mark.usefixtures("unchecked")
def test_arguments_that_do_not_fit_are_refused():
    arrays = [np.float32(x) for x in draw(5)]
    _, state = ours(*arrays, return_state=True)
    with pytest.raises(ValueError, match="local_window_size must be an integer >= 1"):
        ours(*arrays, window_size=0)
    with pytest.raises(ValueError, match=r"initial_state.key must have shape \(2, 2, 8, 3\)"):
        ours(*arrays, window_size=8, initial_state=state)
    earlier = replace(state.earlier, log_z=state.earlier.log_z[..., :1])
    with pytest.raises(ValueError, match=r"earlier.log_z must have shape \(2, 2, 5\)"):
        ours(*arrays, initial_state=replace(state, earlier=earlier))
    with pytest.raises(ValueError, match=r"num_tokens must have shape \(2, 2\)"):
        ours(*arrays, initial_state=replace(state, num_tokens=state.num_tokens[0]))
    with pytest.raises(ValueError, match=r"initial_state: it has decay, .*; give log_decay"):
        ours(*arrays[:6], initial_state=state)
    with pytest.raises(ValueError, match="initial_state: it has no decay, but log_decay is given"):
        ours(*arrays, initial_state=replace(state, log_decay=None))
    earlier = replace(state.earlier, log_decay=state.earlier.log_decay[..., :1])
    with pytest.raises(ValueError, match=r"earlier.log_decay must have shape \(2, 2, 5\)"):
        ours(*arrays, initial_state=replace(state, earlier=earlier))
    with pytest.raises(ValueError, match="log_decay: one of the states has none"):
        state.merge(replace(state, log_decay=None))
    with pytest.raises(ValueError, match="log_decay must be at most 0"):
        ours(*arrays[:6], -arrays[6])
    with pytest.raises(ValueError, match=r"query_features must have shape \(2, 5, 4, 5\)"):
        log_window_attention(*arrays[:3], arrays[3][..., 1:], arrays[4], local_window_size=2)


@pytest.mark.skipif(mosaic.is_available(), reason="a GPU is available")
def test_kernels_need_a_gpu():
    arrays = [np.float32(x) for x in draw(5)]
    with pytest.raises(NotImplementedError, match="it needs an NVIDIA GPU"):
        ours(*arrays, implementation="gpu")


@pytest.mark.parametrize("length", [100, 300])
def test_scan_has_forward_mode_derivatives_at_every_length(length):
    """Also where other implementations compute the window in tiles."""
    x = jnp.zeros((length, 1, 2))

    def attend(x):
        return log_window_attention(x, x, x, x, x, local_window_size=4, implementation="scan")

    assert jax.eval_shape(lambda x: jax.jvp(attend, (x,), (x,))[1], x).shape == x.shape
