"""Sampling: against results of the original, and its properties on new inputs."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.data import get_tokenizer
from heinsen_jax.generate import Engine, compiled, decode_stream, filter_logits, generate, stream
from heinsen_jax.generate.sampling import Sampler
from heinsen_jax.generate.tokens import further_tokens
from heinsen_jax.interop.torch import from_state_dict
from heinsen_jax.models import LanguageModel
from tests.models.mechanisms_test import build
from tests.models.small import apply, assert_greedy

PROMPT = jnp.array([3, 1, 4])


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return build("log")


def test_greedy_tokens_equal_the_originals(x64, golden):
    case = golden("glm_sym")
    arrays = {name[6:]: x for name, x in case.items() if name.startswith("param/")}
    original = from_state_dict(arrays, num_heads=int(case["config"][3]))
    tokens = generate(original, jnp.asarray(case["gen/prompt"]), 16, top_k=1)
    np.testing.assert_array_equal(tokens, case["gen/greedy16"])


def test_filters_equal_the_originals(x64, golden):
    case = golden("glm_sym")
    names = [name for name in case if name.startswith("gen/filter_temp")]
    assert names
    for name in names:
        temperature, top_k = name.split("/")[1].removeprefix("filter_temp").split("_top")
        top_k = None if top_k in ("None", "0") else int(top_k)
        filtered = filter_logits(jnp.asarray(case["gen/last_logits"]), float(temperature), top_k)
        np.testing.assert_allclose(jax.nn.softmax(filtered), case[name], atol=1e-10)


def test_ties_with_the_last_candidate_stay(x64, golden):
    case = golden("glm_sym")
    probabilities = jax.nn.softmax(filter_logits(jnp.asarray(case["gen/tie/logits"]), 1.0, 2))
    np.testing.assert_allclose(probabilities, case["gen/tie/top2_probs"], atol=1e-12)


@pytest.mark.parametrize("top_k", [None, 3])
def test_candidates_of_top_p_are_the_fewest_that_reach_it(top_k):
    p = np.array([[0.05, 0.4, 0.3, 0.15, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]])
    for top_p in (1e-6, 0.39, 0.41, 0.69, 0.8, 0.9, 1.0):
        filtered = filter_logits(jnp.log(jnp.asarray(p)) * 0.7, 0.7, top_k, top_p)
        for row, have in zip(p, np.isfinite(filtered), strict=True):
            order = np.argsort(-row)[: top_k or 5]
            reached = np.cumsum(row[order]) / row[order].sum()
            least = row[order[np.argmax(reached >= min(top_p, reached[-1]))]]
            floor = row[order[-1]]
            np.testing.assert_array_equal(have, row >= max(least, floor))


def test_a_probability_of_1_keeps_all_tokens():
    """Sums over a large vocabulary are rounded to 1 before the last token."""
    logits = jax.random.normal(jax.random.key(1), (20, 50304)) * 3
    assert bool(jnp.isfinite(filter_logits(logits, 1.0, None, 1.0)).all())


@pytest.mark.parametrize("top_p", [1e-40, 1e-46])
def test_the_likeliest_token_remains_if_float32_has_no_such_top_p(top_p):
    sampler = Sampler(jax.random.key(0), 1.0, None, 4, top_p)
    assert sampler.draw(jnp.array([1.0, 7.0, 9.0, 3.0]), jax.random.key(1)) == 2


@pytest.mark.parametrize("top_p", [None, 0.9])
@pytest.mark.parametrize("temperature", [1e-37, 1e-39, 1e-45])
def test_the_lowest_temperatures_are_greedy(temperature, top_p):
    """Quotients would overflow, or float32 has no such number."""
    sampler = Sampler(jax.random.key(0), temperature, None, 4, top_p)
    assert sampler.draw(jnp.array([1.0, 7.0, 9.0, 3.0]), jax.random.key(1)) == 2


@pytest.mark.parametrize("temperature", [1e38, np.inf])
def test_the_highest_temperatures_keep_the_candidates_of_top_k(temperature):
    """Quotients are equal."""
    sampler = Sampler(jax.random.key(0), temperature, 2, 4)
    drawn = sampler.draw(jnp.tile(jnp.array([1.0, 7.0, 9.0, 3.0]), (50, 1)), jax.random.key(1))
    assert {*drawn.tolist()} == {1, 2}


def test_prompts_and_numbers_of_new_tokens_share_compiled_functions():
    """Ten sizes of chunks serve prompts of all lengths."""
    model = build("softmax", num_layers=2, model_dim=20)  # a shape that no other test compiles
    functions = compiled.compiled_block, further_tokens
    counts = [function._cache_size() for function in functions]
    for length, number in ((3, 2), (5, 9), (7, 17), (6, 100), (4, 3)):
        generate(model, jnp.ones((2, length), jnp.int32), number, top_k=1)
    added = [after._cache_size() - x for after, x in zip(functions, counts, strict=True)]
    assert added == [3, 1]  # chunks of 4, 2 and 1


def test_greedy_equals_recomputing_everything_also_after_a_state(model):
    tokens = jnp.array([[3, 1, 4], [1, 5, 9]])
    first, state = generate(model, tokens, 12, top_k=1, return_state=True)
    second = generate(model, first[:, -1:], 12, top_k=1, state=state)
    assert_greedy(model, tokens, np.concatenate([first, second], 1))


def decoding(model: LanguageModel, carry: tuple) -> str:
    """Return the program that a loop over tokens is compiled to."""
    served = Engine(model)
    sampler = Sampler.of(model.config, 1.0, 1, None, None)
    lowered = further_tokens.lower(served.structure, 8, served.weights, sampler, carry, 1, 7)
    return lowered.compile().as_text()


@pytest.mark.nightly
@pytest.mark.usefixtures("as_users_compile")
def test_decoding_loops_hold_the_weights_of_each_layer(model):
    """Slicing stacked weights would copy them at every token."""
    stack = nnx.state(model)["blocks"][0]["attention"]["project"]["kernel"][...].shape
    lines = decoding(model, (PROMPT[0], model.init_state(()))).splitlines()
    (loop,) = [line for line in lines if " while(" in line]
    layer = "f32[{},{}]".format(*stack[1:])
    assert loop.split(" while(")[0].count(layer) == stack[0]
    assert "f32[{},{},{}]".format(*stack) not in loop


@pytest.mark.usefixtures("as_users_compile")
@pytest.mark.parametrize(
    ("name", "batch"),
    [
        ("softmax", ()),
        *(
            pytest.param(*x, marks=pytest.mark.nightly)
            for x in (("softmax", (1,)), ("gqa", (3,)), ("fox", (3,)))
        ),
    ],
)
def test_decoding_loops_do_not_copy_keys_and_values(name, batch):
    """The body of the loop has no operation on arrays of the size of keys or values, but for the
    branches that write a token."""
    model = build(name, num_layers=2)
    carry = jnp.broadcast_to(PROMPT[0], batch), model.init_state(batch, capacity=4321)
    lines = decoding(model, carry).splitlines()
    (loop,) = [line for line in lines if " while(" in line]
    body = loop.partition("body=%")[2].split(",")[0]
    start = next(i for i, line in enumerate(lines) if line.startswith(f"%{body} "))
    # numbers of a token: sums of decays have 6, keys or values of two heads 10
    least = 4321 * math.prod(batch) * (7 if name == "fox" else 5)
    found = [
        line
        for line in lines[start : lines.index("}", start)]
        for shape in re.findall(r"= f32\[([\d,]*)\]\S* (?!get-tuple-element|bitcast)", line)
        if "4321" in shape and math.prod(map(int, shape.split(","))) >= least
    ]
    assert not found
    assert sum(" conditional(" in x for x in lines[start : lines.index("}", start)]) == 2


@pytest.mark.nightly
def test_keys_of_both_kinds_determine_the_sample(model):
    first, again, old, other = (
        generate(model, PROMPT, 20, key=key).tolist()
        for key in (*map(jax.random.key, (1, 1)), jax.random.PRNGKey(1), jax.random.key(2))
    )
    assert first == again == old != other


def test_stream_gives_the_same_tokens(model):
    key = jax.random.key(5)
    whole = generate(model, PROMPT, 20, key=key, temperature=0.7).tolist()
    streamed = stream(model, PROMPT, key=key, temperature=0.7)
    assert [token for _, token in zip(range(20), streamed, strict=False)] == whole


def test_samples_follow_the_models_probabilities(model):
    """Compare 4000 first tokens with the softmax of the 12 most probable ones: a chi-square
    statistic with 11 degrees of freedom."""
    prompt = jnp.broadcast_to(PROMPT, (4000, 3))
    key = jax.random.key(0)
    drawn = np.asarray(generate(model, prompt, 1, key=key, temperature=2.0, top_k=12)[:, 0])
    logits = np.asarray(apply(model, PROMPT)[-1], np.float64) / 2
    candidates = np.argsort(logits)[-12:]
    expected = np.exp(logits[candidates])
    expected *= 4000 / expected.sum()
    counts = np.bincount(drawn, minlength=17)[candidates]
    assert counts.sum() == 4000
    assert expected.min() > 5
    assert np.sum((counts - expected) ** 2 / expected) < 31.3  # exceeded once in a thousand


def test_padded_ids_are_never_drawn(model):
    drawn = generate(
        model, jnp.array([3]), 200, key=jax.random.key(0), temperature=50.0, num_tokens=5
    )
    assert int(drawn.max()) == 4


def test_zero_new_tokens(model):
    assert generate(model, jnp.array([[3, 1]]), 0, top_k=1).shape == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": jnp.zeros((0,), jnp.int32)}, "the prompt has no tokens"),
        ({"tokens": jnp.array([17])}, "token id 17 is outside"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"top_k": 0}, "top_k=0 must be in 1 .. 17"),
        ({"top_k": 18}, "top_k=18 must be in 1 .. 17"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0 and at most 1"),
        ({"key": None}, "sampling needs key"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"num_tokens": 18}, "num_tokens=18"),
        ({"max_new_tokens": 0, "return_state": True}, "no token is processed"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, r"key\[3\] must be one jax.random.key"),
    ],
)
def test_bad_arguments_are_named(model, change, message):
    arguments = {"tokens": jnp.array([1]), "max_new_tokens": 1, "key": jax.random.key(0)} | change
    tokens, count = arguments.pop("tokens"), arguments.pop("max_new_tokens")
    with pytest.raises(ValueError, match=message):
        generate(model, tokens, count, **arguments)


def test_text_is_streamed_by_complete_characters():
    tokenizer = get_tokenizer("bytes")
    text = "aé日🙂"
    chunks = list(decode_stream(tokenizer, iter(tokenizer.encode(text))))
    assert "".join(chunks) == text
    assert "�" not in "".join(chunks)
