"""Sampling: against the original's own numbers, and its promises on fresh ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from heinsen_jax.data import get_tokenizer
from heinsen_jax.generate import decode_stream, filter_logits, generate, stream
from heinsen_jax.interop.torch import from_state_dict
from heinsen_jax.models import LanguageModel, LanguageModelConfig


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    config = LanguageModelConfig(vocab_size=17, model_dim=12, num_layers=2, num_heads=2)
    return LanguageModel(config, rngs=nnx.Rngs(0))


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


def test_greedy_equals_recomputing_everything(model):
    tokens = jnp.array([[3, 1, 4], [1, 5, 9]])
    new = generate(model, tokens, 12, top_k=1)
    following = jnp.argmax(model(jnp.concatenate([tokens, new], 1)), -1)
    np.testing.assert_array_equal(new, following[:, 2:-1])


def test_going_on_from_a_state_equals_going_through(model):
    prompt = jnp.array([3, 1, 4])
    whole = generate(model, prompt, 10, top_k=1)
    first, state = generate(model, prompt, 4, top_k=1, return_state=True)
    second = generate(model, first[-1:], 6, top_k=1, state=state)
    np.testing.assert_array_equal(jnp.concatenate([first, second]), whole)


def test_a_key_decides_the_sample(model):
    prompt = jnp.array([3, 1, 4])
    first, again, other = (
        generate(model, prompt, 20, key=jax.random.key(seed)).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


def test_keys_of_either_kind(model):
    new, old = jax.random.key(1), jax.random.PRNGKey(1)
    prompt = jnp.array([[3, 1, 4], [2, 7, 1]])
    have, want = (generate(model, prompt, 9, key=key) for key in (old, new))
    np.testing.assert_array_equal(have, want)


def test_stream_gives_the_same_tokens(model):
    prompt, key = jnp.array([3, 1, 4]), jax.random.key(5)
    whole = generate(model, prompt, 9, key=key, temperature=0.7, top_k=5).tolist()
    streamed = stream(model, prompt, key=key, temperature=0.7, top_k=5)
    assert [token for _, token in zip(range(9), streamed, strict=False)] == whole


def test_samples_follow_the_models_probabilities(model):
    """4000 first tokens against the softmax: a chi-square statistic of 16 degrees of freedom."""
    prompt = jnp.broadcast_to(jnp.array([3, 1, 4]), (4000, 3))
    drawn = generate(model, prompt, 1, key=jax.random.key(0), temperature=0.5)[:, 0]
    expected = 4000 * jax.nn.softmax(model(prompt[:1])[0, -1] / 0.5)
    counts = jnp.bincount(drawn, length=17)
    assert float(jnp.sum((counts - expected) ** 2 / expected)) < 39.3  # exceeded once in a thousand


def test_padded_ids_are_never_drawn(model):
    drawn = generate(
        model, jnp.array([3]), 200, key=jax.random.key(0), temperature=50.0, num_tokens=5
    )
    assert int(drawn.max()) == 4


def test_no_new_tokens_are_none(model):
    assert generate(model, jnp.array([[3, 1]]), 0, top_k=1).shape == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": jnp.zeros((0,), jnp.int32)}, "the prompt has no tokens"),
        ({"tokens": jnp.array([17])}, "token id 17 is outside"),
        ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
        ({"top_k": 0}, "top_k=0 must be in 1 .. 17"),
        ({"top_k": 18}, "top_k=18 must be in 1 .. 17"),
        ({"key": None}, "sampling needs key"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"num_tokens": 18}, "num_tokens=18"),
        ({"max_new_tokens": 0, "return_state": True}, "would read nothing"),
        ({"key": jax.random.split(jax.random.key(0), 3)}, r"key\[3\] must be one jax.random.key"),
    ],
)
def test_bad_arguments_are_named(model, change, message):
    arguments = {"tokens": jnp.array([1]), "max_new_tokens": 1, "key": jax.random.key(0)} | change
    tokens, count = arguments.pop("tokens"), arguments.pop("max_new_tokens")
    with pytest.raises(ValueError, match=message):
        generate(model, tokens, count, **arguments)


def test_text_streams_by_whole_characters():
    tokenizer = get_tokenizer("bytes")
    text = "aé日🙂"
    pieces = list(decode_stream(tokenizer, iter(tokenizer.encode_ordinary(text))))
    assert "".join(pieces) == text
    assert "�" not in "".join(pieces)
