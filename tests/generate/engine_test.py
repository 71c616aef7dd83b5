"""The engine: the logits and states of the model, for any sizes of steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.data import get_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import Engine, generate, load_state, stream
from heinsen_jax.generate.compiled import step
from heinsen_jax.generate.states import fingerprint
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from tests.models.mechanisms_test import build
from tests.models.small import apply, random_model

TOKENS = np.random.default_rng(0).integers(0, 17, (2, 13))
PATTERN = "log", "softmax", "sliding_window"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    """A pattern of three mechanisms, twice."""
    return build(*PATTERN, block="standard", convolution_size=2)


@pytest.fixture(scope="module")
def engine(model) -> Engine:
    return Engine(model, get_tokenizer("bytes"))


def test_logits_equal_the_models(model, engine):
    whole = apply(model, TOKENS)
    logits, state = engine.feed(TOKENS[:, :7])
    np.testing.assert_allclose(logits, whole[:, 6], atol=1e-4)
    logits, state = engine.feed(TOKENS[:, 7:10], state)
    np.testing.assert_allclose(logits, whole[:, 9], atol=1e-4)
    for place in (10, 11, 12):
        logits, state = engine.step(TOKENS[:, place], state)
        np.testing.assert_allclose(logits, whole[:, place], atol=1e-4)
    expected = apply(model, TOKENS, return_state=True)[1]
    for layer in (0, 2, 3, 5):  # with states of constant size
        pairs = zip(*(jax.tree.leaves(x.blocks[layer]) for x in (state, expected)), strict=True)
        for have, want in pairs:
            np.testing.assert_allclose(have, want, atol=1e-4)


def test_rows_of_different_lengths(model, engine):
    lengths = np.array([0, 13, 6, 5])
    tokens = np.concatenate([TOKENS, TOKENS[::-1]])
    logits, state = engine.feed(tokens, lengths=lengths)
    further, _ = engine.step(tokens[:, 0], state)
    for row, length in enumerate(lengths):
        given = tokens[row, :length]
        whole = apply(model, np.append(given, tokens[row, 0]))
        if length:
            np.testing.assert_allclose(logits[row], whole[-2], atol=1e-4)
        np.testing.assert_allclose(further[row], whole[-1], atol=1e-4)


def test_scores_are_log_probabilities_of_targets(model, engine):
    targets = np.roll(TOKENS, -1, 1)
    log_p = jax.nn.log_softmax(apply(model, TOKENS))
    expected = np.take_along_axis(np.asarray(log_p), targets[..., None], -1)[..., 0]
    have, is_likeliest, _ = engine.score(TOKENS, targets, engine.init_state((2,)), num_tokens=9)
    np.testing.assert_allclose(have, expected, atol=1e-4)
    np.testing.assert_array_equal(is_likeliest, np.argmax(log_p[..., :9], -1) == targets)


def test_a_state_is_continued_by_branches_and_from_a_file(model, engine, tmp_path):
    _, state = engine.feed(TOKENS[0])
    engine.save(tmp_path / "state", state)
    assert fingerprint(engine) == fingerprint(model)
    again = load_state(tmp_path / "state", model)
    next_tokens = np.array([3, 1, 4])
    many, _ = engine.step(next_tokens, engine.branch(engine.load(tmp_path / "state"), 3))
    for token, logits in zip(next_tokens, many, strict=True):
        one, _ = model(jnp.array([token]), state=again, return_state=True)
        np.testing.assert_allclose(logits, one[0], atol=1e-4)


def test_a_step_beyond_the_capacity_grows_it(model, engine):
    _, state = engine.feed(TOKENS[0, :4], engine.init_state(capacity=4))
    assert state.blocks[1].attention.capacity == 4
    logits, state = engine.step(TOKENS[0, 4], state)
    np.testing.assert_allclose(logits, apply(model, TOKENS[0, :5])[-1], atol=1e-4)
    assert state.blocks[1].attention.capacity == 256


def test_weights_may_be_on_the_host(model, engine):
    graph, parameters = nnx.split(model)
    on_host = nnx.merge(graph, jax.tree.map(np.asarray, parameters))
    other = Engine(on_host)
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(other.weights))
    np.testing.assert_array_equal(other.feed(TOKENS)[0], engine.feed(TOKENS)[0])


@pytest.mark.parametrize("lengths", [None, [13, 6]])
def test_prompts_in_jit(model, lengths):
    graph, parameters = nnx.split(model)

    @jax.jit
    def write(parameters, tokens):
        return generate(nnx.merge(graph, parameters), tokens, 3, top_k=1, lengths=lengths)

    expected = generate(model, TOKENS, 3, top_k=1, lengths=lengths)
    np.testing.assert_array_equal(write(parameters, jnp.asarray(TOKENS)), expected)


def test_branches_of_rows_of_different_lengths(model, engine, tmp_path):
    _, state = engine.feed(TOKENS, lengths=[3, 7])
    engine.save(tmp_path / "state", engine.branch(state, 2))
    logits, _ = engine.step(np.array([[1, 2], [3, 4]]), engine.load(tmp_path / "state"))
    for row, length in enumerate((3, 7)):
        for column in range(2):
            tokens = np.append(TOKENS[row, :length], 2 * row + column + 1)
            np.testing.assert_allclose(logits[row, column], apply(model, tokens)[-1], atol=1e-4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: x.feed(5), "tokens: a single number"),
        (lambda x: x.feed([17]), "token id 17 is outside"),
        (lambda x: x.step(-1, x.init_state()), "token id -1 is outside"),
        (lambda x: x.score(TOKENS, TOKENS + 9, x.init_state((2,))), "token id .* is outside"),
        (
            lambda x: x.feed(TOKENS, lengths=[5, 14]),
            r"lengths=\[5, 14\] must be integers in 0 .. 13",
        ),
        (lambda x: x.feed(TOKENS, lengths=5), r"lengths\[\] must be \[B\]"),
        (lambda x: x.feed(TOKENS, x.init_state()), r"state: its batch axes \[\] differ from \[2\]"),
        (lambda x: x.step([1, 2], x.init_state((4,))), r"axes \[4\] differ from \[2\]"),
        (lambda x: x.score(TOKENS, TOKENS, x.init_state((4,))), r"axes \[4\] differ from \[2\]"),
        (lambda x: stream(x, TOKENS, top_k=1), "a stream is one sequence"),
    ],
)
def test_bad_arguments_are_named(engine, call, message):
    with pytest.raises(ValueError, match=message):
        call(engine)


@pytest.mark.parametrize("fields", [{}, {"positions": "learned", "max_length": 5}])
def test_too_many_tokens_in_jit_are_refused(fields):
    """They would be NaN."""
    graph, parameters = nnx.split(build("softmax", convolution_size=None, **fields))

    @jax.jit
    def write(parameters, tokens, state):
        return generate(nnx.merge(graph, parameters), tokens, 4, top_k=1, state=state)

    state = None if fields else nnx.merge(graph, parameters).init_state((), capacity=5)
    with pytest.raises(UserError, match=r"6 more tokens|capacity of 5 tokens is less than 6"):
        write(parameters, jnp.array([3, 1, 4]), state)


def test_unsupported_calls_raise(model):
    with pytest.raises(ValueError, match="the engine has no tokenizer"):
        _ = Engine(model).tokenizer
    fields = {"positions": "learned", "max_length": 5, "convolution_size": None}
    with pytest.raises(UserError, match=r"6 more tokens, but the model has 5 positions left"):
        Engine(build("softmax", **fields)).feed(TOKENS[0, :6])


def test_a_cpu_has_the_parameters_of_one_layer_in_float32():
    """Products of bfloat16 are computed in float32 there."""
    sizes = {"vocab_size": 32, "model_dim": 64, "num_layers": 8, "num_heads": 4, "block": "llama"}
    config = LanguageModelConfig(**sizes, attention="linear", param_dtype="bfloat16")
    engine = Engine(random_model(config))
    arguments = engine.structure, engine.weights, jnp.zeros(1, jnp.int32), engine.init_state((1,))
    memory = step.lower(*arguments).compile().memory_analysis()
    one_layer = sum(4 * x.size for x in engine.weights.layers[0])
    assert memory.temp_size_in_bytes < 2 * one_layer
    logits, _ = step(*arguments)
    assert np.isfinite(logits).all()
    tokens = jnp.array([1, 2, 3])
    assert engine.score(tokens, tokens, engine.init_state(()))[0].shape == (3,)


@pytest.mark.parametrize("attention", ["linear", "gqa"])
def test_rows_of_parameters_in_bfloat16_are_independent(attention):
    """Also if one has values of NaN."""
    sizes = {"vocab_size": 5, "model_dim": 8, "num_layers": 1, "num_heads": 2, "block": "llama"}
    config = LanguageModelConfig(
        **sizes, attention=attention, param_dtype="bfloat16", tie_embeddings=False
    )
    model = nnx.clone(random_model(config))
    model.embed.embedding[...] = model.embed.embedding[...].at[3].set(jnp.nan)
    engine = Engine(model)
    logits, _ = engine.step(jnp.array([3, 1]), engine.init_state((2,), capacity=4))
    assert np.isfinite(logits).all(1).tolist() == [False, True]
    empty = jnp.zeros(0, jnp.int32)
    assert engine.step(empty, engine.init_state((0,), capacity=4))[0].shape == (0, 5)
