"""Texts continued: as they would be alone, as often as asked for, up to where they end."""

import jax
import jax.numpy as jnp
import pytest
import tiktoken

from heinsen_jax.data import end_of_text_id, get_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import complete, generate
from heinsen_jax.generate.text import bytes_of
from tests.models.mechanisms_test import build

TOKENIZER = get_tokenizer("bytes")
PROMPTS = ["a", "Some words, of which there are more than thirty-two.", "Others"]
SIZES = {"vocab_size": 264, "num_layers": 1, "block": "standard"}


@pytest.fixture(scope="module", params=["log", pytest.param("softmax", marks=pytest.mark.nightly)])
def model(request):
    return build(request.param, **SIZES)


def alone(model, prompt: str, number: int, key=None) -> list[int]:
    tokens = jnp.asarray(TOKENIZER.encode_ordinary(prompt))
    options = {"top_k": 1} if key is None else {"key": key, "temperature": 0.9}
    new = generate(model, tokens, number, num_tokens=TOKENIZER.n_vocab, **options).tolist()
    end = end_of_text_id(TOKENIZER)
    return new[: new.index(end)] if end in new else new


def test_greedy_texts_are_those_of_each_prompt_alone(model):
    texts = complete(model, TOKENIZER, PROMPTS, 40, top_k=1)
    assert texts == [[TOKENIZER.decode(alone(model, prompt, 40))] for prompt in PROMPTS]


def test_samples_do_not_depend_on_other_prompts(model):
    key = jax.random.key(3)
    texts = complete(model, TOKENIZER, PROMPTS, 20, key=key, temperature=0.9, num_samples=3)
    for prompt, samples in zip(PROMPTS, texts, strict=True):
        assert len(samples) == 3
        for i, text in enumerate(samples):
            assert text == TOKENIZER.decode(alone(model, prompt, 20, jax.random.fold_in(key, i)))
        assert len({*samples}) > 1


def test_a_text_ends_before_the_first_string_that_stops_it(model):
    key = jax.random.key(0)
    options = {"key": key, "num_samples": 4}
    whole = complete(model, TOKENIZER, PROMPTS, 90, **options)
    middle = len(whole[0][0]) // 2, len(whole[1][2]) // 3
    stop = [whole[0][0][middle[0] :][:2], whole[1][2][middle[1] :][:2]]
    ended = complete(model, TOKENIZER, PROMPTS, 90, stop=stop, **options)
    for texts, cut in zip(whole, ended, strict=True):
        for text, have in zip(texts, cut, strict=True):
            places = [text.find(each) for each in stop if each in text]
            assert have == (text[: min(places)] if places else text)
    assert len(ended[0][0]) <= middle[0]
    assert len(ended[1][2]) <= middle[1]


def test_no_more_tokens_than_asked_for(model):
    for most in (0, 1, 2, 33):
        ((text,),) = complete(model, TOKENIZER, PROMPTS[:1], most, top_k=1)
        assert text == (TOKENIZER.decode(alone(model, PROMPTS[0], most)) if most else "")
    assert complete(model, TOKENIZER, [], 5, top_k=1) == []


def test_prompts_after_a_state(model):
    before = jnp.asarray(TOKENIZER.encode_ordinary("Before. "))
    _, state = model(before, return_state=True)
    texts = complete(model, TOKENIZER, PROMPTS, 12, top_k=1, state=state)
    whole = complete(model, TOKENIZER, [f"Before. {x}" for x in PROMPTS], 12, top_k=1)
    assert texts == whole


def test_ids_of_no_token_are_shown_as_such():
    """Published encodings leave some out."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = {"<|endoftext|>": 263}
    gaps = tiktoken.Encoding(
        "gaps", pat_str="(?s:.)", mergeable_ranks=ranks, special_tokens=special
    )
    assert bytes_of(gaps, 260).decode() == "\N{REPLACEMENT CHARACTER}"
    key = jax.random.key(0)
    texts = complete(build("log", **SIZES), gaps, ["a"], 60, key=key, num_samples=9)
    assert any("\N{REPLACEMENT CHARACTER}" in text for text in texts[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": "a"}, "lists of strings"),
        ({"stop": "a"}, "lists of strings"),
        ({"prompts": ["a", ""]}, r"prompts\[1\] is empty"),
        ({"stop": [""]}, "stop has an empty string"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"top_k": None}, "sampling needs key"),
        ({"key": jax.random.split(jax.random.key(0))}, "key must be one jax.random.key"),
        ({"state": build("log", **SIZES).init_state((2,))}, "of a batch of texts"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"prompts": ["a"], "max_new_tokens": 3, "top_k": 1} | change
    with pytest.raises(UserError, match=message):
        complete(build("log", **SIZES), TOKENIZER, **arguments)
