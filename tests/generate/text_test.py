"""Continuations of text: equal to those of single prompts, in any number, up to stop strings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.data import get_tokenizer
from heinsen_jax.data.tokenizer_tiktoken import TiktokenTokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import complete, generate
from heinsen_jax.generate import text as module
from heinsen_jax.generate.text import until_end
from tests.models.mechanisms_test import build
from tests.models.small import apply

TOKENIZER = get_tokenizer("bytes")
PROMPTS = ["a", "Some words, more than thirty-two of them.", "Others"]
SIZES = {"vocab_size": 264, "num_layers": 1, "block": "standard"}
SAMPLES, MAX_NEW_TOKENS = 3, 90


@pytest.fixture(scope="module", params=["log", pytest.param("softmax", marks=pytest.mark.nightly)])
def model(request):
    return build(request.param, **SIZES)


def alone(model, **options) -> list[list[int]]:
    """Return the new tokens of each prompt, up to the end of text; tests/generate/prompts_test.py
    compares such rows with single prompts."""
    texts = [TOKENIZER.encode(prompt) for prompt in PROMPTS]
    tokens = np.zeros((len(texts), max(map(len, texts))), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    options |= {"num_tokens": TOKENIZER.vocab_size, "lengths": [*map(len, texts)]}
    rows = generate(model, tokens, MAX_NEW_TOKENS, **options).tolist()
    end = TOKENIZER.end_of_text_id
    return [new[: new.index(end)] if end in new else new for new in rows]


@pytest.mark.nightly
def test_greedy_samples_equal_those_of_single_prompts(model):
    tokens = alone(model, top_k=1)
    for number in (0, 1, 2, 33, MAX_NEW_TOKENS):
        texts = complete(model, TOKENIZER, PROMPTS, number, top_k=1)
        assert texts == [[TOKENIZER.decode(row[:number])] for row in tokens]
    assert complete(model, TOKENIZER, [], 5, top_k=1) == []


@pytest.mark.parametrize(("number", "expected"), [(9, [97, 98]), (2, [97, 98]), (1, [97])])
def test_tokens_are_those_before_the_end_of_text(number, expected):
    assert [*until_end(iter([97, 98, 256, 99]), TOKENIZER, number)] == expected


def test_samples_do_not_depend_on_other_prompts(model):
    key = jax.random.key(3)
    options = {"key": key, "temperature": 0.9, "num_samples": SAMPLES}
    texts = complete(model, TOKENIZER, PROMPTS, MAX_NEW_TOKENS, **options)
    for i in range(SAMPLES):
        keys = jnp.stack([jax.random.fold_in(key, i)] * len(PROMPTS))
        for samples, row in zip(texts, alone(model, key=keys, temperature=0.9), strict=True):
            assert samples[i] == TOKENIZER.decode(row)
    assert all(len({*samples}) > 1 for samples in texts)


def test_a_sample_ends_before_the_first_stop_string(model):
    options = {"key": jax.random.key(0), "num_samples": SAMPLES}
    whole = complete(model, TOKENIZER, PROMPTS, MAX_NEW_TOKENS, **options)
    middle = len(whole[0][0]) // 2, len(whole[1][2]) // 3
    stop = [whole[0][0][middle[0] :][:2], whole[1][2][middle[1] :][:2]]
    ended = complete(model, TOKENIZER, PROMPTS, MAX_NEW_TOKENS, stop=stop, **options)
    for texts, cut in zip(whole, ended, strict=True):
        for text, have in zip(texts, cut, strict=True):
            places = [text.find(each) for each in stop if each in text]
            assert have == (text[: min(places)] if places else text)
    assert len(ended[0][0]) <= middle[0]
    assert len(ended[1][2]) <= middle[1]


@pytest.mark.nightly
def test_prompts_after_a_state(model):
    """The longest prompt is unchanged, and so is the shape."""
    before = jnp.asarray(TOKENIZER.encode("Before. "))
    _, state = apply(model, before, return_state=True)
    texts = complete(model, TOKENIZER, PROMPTS, 12, top_k=1, state=state)
    prompts = [f"Before. {PROMPTS[0]}", PROMPTS[1], f"Before. {PROMPTS[2]}"]
    whole = complete(model, TOKENIZER, prompts, 12, top_k=1)
    assert (texts[0], texts[2]) == (whole[0], whole[2])
    assert texts[0] != complete(model, TOKENIZER, PROMPTS, 12, top_k=1)[0]


def test_invalid_ids_are_shown_as_such():
    """Published encodings have gaps."""
    ranks = {bytes([byte]): byte for byte in range(256)}
    special = {"<|endoftext|>": 263}
    gaps = TiktokenTokenizer("gaps", "(?s:.)", ranks, special)
    assert gaps.token_bytes(260).decode() == "\N{REPLACEMENT CHARACTER}"
    key = jax.random.key(0)
    texts = complete(build("log", **SIZES), gaps, ["a"], 60, key=key, num_samples=9)
    assert any("\N{REPLACEMENT CHARACTER}" in text for text in texts[0])


def test_a_character_of_several_tokens_is_not_an_error_before_it_is_complete(monkeypatch):
    first, *others = TOKENIZER.encode("é")
    new = np.array([[*others, TOKENIZER.end_of_text_id]])
    monkeypatch.setattr(module, "draw", lambda *_: jnp.array([first]))
    monkeypatch.setattr(module, "further_tokens", lambda *arguments: (arguments[4], new))
    options = {"top_k": 1, "decoding_errors": "strict"}
    assert complete(build("log", **SIZES), TOKENIZER, ["a"], 3, **options) == [["é"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": "a"}, "lists of strings"),
        ({"stop": "a"}, "lists of strings"),
        ({"prompts": ["a", ""]}, r"prompts\[1\] is empty"),
        ({"stop": [""]}, "stop contains an empty string"),
        ({"num_samples": 0}, "num_samples=0"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"top_k": None}, "sampling needs key"),
        ({"key": jax.random.split(jax.random.key(0))}, "key must be one jax.random.key"),
        ({"state": build("log", **SIZES).init_state((2,))}, "state: has a batch axis"),
    ],
)
def test_bad_arguments_are_named(change, message):
    arguments = {"prompts": ["a"], "max_new_tokens": 3, "top_k": 1} | change
    with pytest.raises(UserError, match=message):
        complete(build("log", **SIZES), TOKENIZER, **arguments)


def test_bare_ids_and_numbers_as_keys_are_refused():
    model, tokenizer = build("linear", vocab_size=264), get_tokenizer("bytes")
    for prompts in ([1, 2], jnp.array([1, 2])):
        with pytest.raises(UserError, match="prompts must be texts or lists of ids"):
            complete(model, tokenizer, prompts, 2, top_k=1)
    with pytest.raises(UserError, match=r"key=0 must be a jax\.random\.key"):
        complete(model, tokenizer, ["ab"], 2, key=0)
