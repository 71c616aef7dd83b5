from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.ops.rmt import SegmentState, segment_recurrence

WIDTH, SIZE, SEGMENT = 4, 3, 5  # features, memory vectors, tokens in a segment


def draw(seed: int, *shape: int, std: float = 1.0) -> np.ndarray:
    return std * np.random.default_rng(seed).standard_normal(shape)


WEIGHTS = draw(0, 3, WIDTH, WIDTH)


def causal_attention(x, weights=WEIGHTS, xp=jnp):
    """Softmax attention with positions, for NumPy or JAX arrays."""
    *_, length, width = x.shape
    position = np.sin(np.arange(length)[:, None] * (1 + np.arange(width))[None]).astype(x.dtype)
    h = x + xp.broadcast_to(position, x.shape)
    query, key, value = (h @ w.astype(x.dtype) for w in weights)
    scores = query @ xp.swapaxes(key, -1, -2)
    visible = np.broadcast_to(np.tri(length, dtype=bool), scores.shape)
    scores = xp.where(visible, scores, -1e30)
    scores = xp.exp(scores - xp.max(scores, -1, keepdims=True))
    return x + xp.tanh((scores / xp.sum(scores, -1, keepdims=True)) @ value)


def by_definition(x, memory, segment_length=SEGMENT, xp=np, layer=None):
    """Return outputs, the memory after the last complete segment, and that after all tokens."""
    layer = layer or partial(causal_attention, xp=xp)
    size, outputs, complete = memory.shape[-2], [], memory
    for start in range(0, x.shape[-2], segment_length):
        tokens = x[..., start : start + segment_length, :]
        y = layer(xp.concatenate([memory, tokens, memory], -2))
        outputs.append(y[..., size : size + tokens.shape[-2], :])
        memory = y[..., size + tokens.shape[-2] :, :]
        complete = memory if tokens.shape[-2] == segment_length else complete
    return xp.concatenate(outputs, -2), complete, memory


run = jax.jit(partial(segment_recurrence, causal_attention), static_argnames=("segment_length",))


@partial(jax.jit, static_argnames="segment_length")
def run_on(x, state, segment_length=SEGMENT):
    return segment_recurrence(
        causal_attention,
        x,
        initial_state=state,
        segment_length=segment_length,
        return_state=True,
    )


def start(memory, segment_length=SEGMENT) -> SegmentState:
    return SegmentState.start(jnp.asarray(memory), segment_length)


CASES = pytest.mark.parametrize(
    ("batch", "length", "size", "segment_length"),
    [
        ((2,), 13, SIZE, 5),
        pytest.param((), 5, SIZE, 5, marks=pytest.mark.nightly),
        pytest.param((2, 1), 7, 2, 100, marks=pytest.mark.nightly),
        pytest.param((2,), 6, 1, 1, marks=pytest.mark.nightly),
        pytest.param((), 100, 2, 7, marks=pytest.mark.nightly),
        ((2,), 11, 0, 4),  # without memory: independent segments
    ],
)


@pytest.mark.usefixtures("x64")
@CASES
def test_values_and_gradients_are_those_of_the_definition(batch, length, size, segment_length):
    x, memory = draw(1, *batch, length, WIDTH), draw(2, *batch, size, WIDTH)
    expected, complete, last = by_definition(x, memory, segment_length)
    cotangent = draw(3, *expected.shape), draw(4, *complete.shape)

    @jax.jit
    def tested(x, memory):
        y, state = segment_recurrence(
            causal_attention, x, memory, segment_length=segment_length, return_state=True
        )
        return (y, state.memory), (state, state.close(causal_attention))

    (y, memory_after), pullback, (state, closed) = jax.vjp(tested, x, memory, has_aux=True)
    np.testing.assert_allclose(y, expected, atol=1e-12)
    np.testing.assert_allclose(memory_after, complete, atol=1e-12)
    np.testing.assert_allclose(closed.memory, last, atol=1e-12)
    count = length % segment_length
    assert int(state.count) == count
    assert int(closed.count) == 0
    np.testing.assert_array_equal(state.tokens[..., :count, :], x[..., length - count :, :])
    np.testing.assert_array_equal(state.tokens[..., count:, :], 0)

    @jax.jit
    def definition(x, memory):
        return by_definition(x, memory, segment_length, jnp)[:2]

    want = jax.vjp(definition, x, memory)[1](cotangent)
    for a, b in zip(pullback(cotangent), want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-10)


# Against the published implementation: one attention layer without an output map.


def published_layer(parameters, x):
    x = jnp.asarray(x)
    qkv = jnp.einsum("bld,ed->ble", x, parameters["model.qkv.weight"])
    qkv = qkv + parameters["model.qkv.bias"].reshape(1, 1, -1)
    query, key, value = jnp.split(qkv, 3, -1)
    scores = jnp.einsum("bld,bmd->blm", query, key) / np.sqrt(x.shape[-1])
    visible = np.tri(x.shape[-2], dtype=bool)[None]
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), -1)
    return x + jnp.einsum("blm,bmd->bld", weights, value)


def embedded(case, parameters):
    return parameters["model.emb.weight"][case["token_ids"]]


def logits_of(y, parameters):
    logits = jnp.einsum("btd,vd->btv", y, parameters["model.head.weight"])
    return logits + parameters["model.head.bias"].reshape(1, 1, -1)


@pytest.fixture
def case(golden):
    arrays = golden("rmt")
    prefix = "param/memory_cell."
    parameters = {
        k.removeprefix(prefix): jnp.asarray(x) for k, x in arrays.items() if k.startswith(prefix)
    }
    return arrays, parameters


@pytest.mark.usefixtures("x64")
def test_language_model_of_the_published_code(case):
    case, parameters = case

    @jax.jit
    def loss(parameters):
        layer = partial(published_layer, parameters)
        y, state = segment_recurrence(
            layer,
            embedded(case, parameters),
            parameters["memory"],
            segment_length=SEGMENT,
            return_state=True,
        )
        logits = logits_of(y, parameters)
        log_p = jax.nn.log_softmax(logits[:, :-1], -1)
        next_ids = case["token_ids"][:, 1:, None]
        loss = -jnp.mean(jnp.take_along_axis(log_p, next_ids, -1))
        return loss, (logits, state.close(layer).memory)

    (value, (logits, memory)), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
    np.testing.assert_allclose(logits, case["logits"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(value, case["loss"], rtol=0, atol=1e-10)
    np.testing.assert_allclose(memory, case["final_memory"], rtol=0, atol=1e-10)
    for name, gradient in gradients.items():
        expected = case[f"grad/memory_cell.{name}"]
        np.testing.assert_allclose(gradient, expected, rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.usefixtures("x64")
def test_logits_of_the_published_code_token_by_token(case):
    case, parameters = case
    layer = partial(published_layer, parameters)
    x = embedded(case, parameters)

    def step(state, token):
        y, state = segment_recurrence(
            layer,
            token[:, None],
            initial_state=state,
            segment_length=SEGMENT,
            return_state=True,
        )
        return state, y[:, 0]

    memory = jnp.broadcast_to(parameters["memory"][None], (2, SIZE, 8))
    state, y = jax.jit(partial(jax.lax.scan, step))(start(memory), jnp.swapaxes(x, 0, 1))
    logits = logits_of(jnp.swapaxes(y, 0, 1), parameters)
    np.testing.assert_allclose(logits, case["logits"], rtol=0, atol=1e-10)
    memory = state.close(layer).memory
    np.testing.assert_allclose(memory, case["final_memory"], rtol=0, atol=1e-10)


# Streaming


def test_complete_segments_run_the_layer_once_each():
    """A chunk that may extend into a further segment skips it if it does not."""
    calls = []

    def layer(x):
        jax.debug.callback(lambda: calls.append(x.shape))
        return causal_attention(x)

    state = start(jnp.zeros((SIZE, WIDTH)))
    for _ in range(3):
        y, state = segment_recurrence(
            layer,
            jnp.ones((SEGMENT, WIDTH)),
            initial_state=state,
            segment_length=SEGMENT,
            return_state=True,
        )
    jax.block_until_ready(y)
    jax.effects_barrier()
    assert calls == 3 * [(SIZE + SEGMENT + SIZE, WIDTH)]


def test_closing_at_the_end_of_a_segment_has_no_effect():
    state = start(draw(8, SIZE, WIDTH).astype(np.float32))
    _, state = run_on(jnp.ones((2 * SEGMENT, WIDTH)), state)
    closed = state.close(causal_attention)
    jax.tree.map(np.testing.assert_array_equal, state, closed)


def test_padding_is_never_a_vector_of_zeros():
    """Normalizing zeros would yield 0 / 0."""

    def layer(x):
        return causal_attention(x / jnp.linalg.norm(x, axis=-1, keepdims=True))

    def total(x, memory):
        y, state = segment_recurrence(layer, x, memory, segment_length=SEGMENT, return_state=True)
        z, state = segment_recurrence(
            layer, x, initial_state=state, segment_length=SEGMENT, return_state=True
        )
        return sum(jnp.sum(a**2) for a in (y, z, state.close(layer).memory))

    memory = draw(11, SIZE, WIDTH).astype(np.float32)
    x = draw(12, 7, WIDTH).astype(np.float32)
    value, gradients = jax.jit(jax.value_and_grad(total, (0, 1)))(x, memory)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in gradients)


def test_extreme_inputs():
    x, memory = (s.astype(np.float32) for s in (draw(13, 13, WIDTH), draw(14, SIZE, WIDTH)))
    total = partial(run, segment_length=SEGMENT)
    gradients_of = jax.jit(jax.grad(lambda *a: jnp.sum(total(*a)), (0, 1)))
    for x_, memory_ in ((1000 * x, 1000 * memory), (np.zeros_like(x), np.zeros_like(memory))):
        y = run(x_, memory_, segment_length=SEGMENT)
        expected, *_ = by_definition(x_.astype(np.float64), memory_.astype(np.float64))
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
        gradients = gradients_of(x_, memory_)
        assert all(np.isfinite(g).all() for g in gradients)


def test_memory_is_that_of_one_segment():
    """Saved for gradients: inputs and memories, but no activations of the layer."""

    def bytes_for(length):
        x, memory = jnp.zeros((length, WIDTH)), jnp.zeros((1, WIDTH))
        loss = jax.grad(lambda x: jnp.sum(segment_recurrence(layer, x, memory, segment_length=32)))
        return jax.jit(loss).lower(x).compile().memory_analysis().temp_size_in_bytes

    def layer(x):
        wide = jnp.cumsum(jnp.tanh(jnp.repeat(x, 64, -1)), -2)
        return x + wide[..., ::64]

    assert (bytes_for(1024) - bytes_for(512)) / (512 * WIDTH * 4) < 16


def test_sequences_of_a_batch_may_have_different_counts():
    x, memory = draw(15, 3, 13, WIDTH).astype(np.float32), draw(16, SIZE, WIDTH).astype(np.float32)
    memories = jnp.broadcast_to(memory, (3, SIZE, WIDTH))
    states = SegmentState(memories, jnp.asarray(x[:, 8:]), jnp.asarray([2, 0, 1]))
    y, _ = jax.jit(jax.vmap(run_on))(x, states)
    for row in range(3):
        state = jax.tree.map(lambda a, row=row: a[row], states)
        np.testing.assert_allclose(y[row], run_on(x[row], state)[0], atol=1e-5)


def test_dtypes_are_those_of_the_inputs():
    x, memory = jnp.ones((3, 7, WIDTH), jnp.bfloat16), jnp.ones((SIZE, WIDTH), jnp.bfloat16)
    call = partial(segment_recurrence, causal_attention, segment_length=SEGMENT)
    y, state = jax.eval_shape(partial(call, return_state=True), x, memory)
    assert {y.dtype, state.memory.dtype, state.tokens.dtype} == {jnp.dtype(jnp.bfloat16)}
    assert jax.eval_shape(call, x, memory.astype(jnp.float32)).dtype == jnp.float32


X, MEMORY = jnp.zeros((2, 7, WIDTH)), jnp.zeros((2, SIZE, WIDTH))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"segment_length": 0}, "segment_length must be"),
        ({"x": jnp.zeros(3)}, "x must be"),
        ({"x": jnp.zeros((2, 7, WIDTH), int)}, "x must be"),
        ({"memory": None}, "exactly one is required"),
        ({"initial_state": start(MEMORY)}, "exactly one is required"),
        ({"memory": jnp.zeros(WIDTH)}, "memory must be"),
        ({"memory": jnp.zeros((SIZE, WIDTH + 1))}, "memory must have shape"),
        ({"memory": None, "initial_state": start(MEMORY, 6)}, "initial_state.tokens must have"),
        ({"memory": None, "initial_state": start(MEMORY[0])}, "initial_state.memory must have"),
        ({"layer": lambda x: x[..., :-1, :]}, "the result of layer must have shape"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_invalid_arguments_raise(arguments, message):
    call = {"layer": causal_attention, "x": X, "memory": MEMORY, "segment_length": SEGMENT}
    with pytest.raises(ValueError, match=message):
        segment_recurrence(**(call | arguments))
