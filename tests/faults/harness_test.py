"""The adapter to the lm-evaluation-harness against the harness's own model of Hugging Face, whose
answers `tests/golden/make_harness.py` recorded."""

import json
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.interop.harness import HarnessModel
from heinsen_jax.interop.harness_options import batch_size_of, generation_options
from heinsen_jax.interop.transformers import import_model

pytestmark = [
    pytest.mark.xdist_group("harness"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*cut on the left:UserWarning"),
]
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
RECORDS = json.loads((GOLDEN / "harness" / "answers.json").read_text())
NAMES = [f"{x['model']}{x['arguments'] or ''}" for x in RECORDS]
FOLDERS = {"qwen2": GOLDEN / "transformers" / "qwen2", "gpt2": GOLDEN / "harness" / "gpt2"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: import_model(path, folder / name) for name, path in FOLDERS.items()}


def made(requests) -> list[SimpleNamespace]:
    return [SimpleNamespace(args=tuple(request)) for request in requests]


def normalized(case, record) -> bool:
    """transformers 5 composes characters for every Qwen2, whatever tokenizer.json says."""
    text = "".join(x for x in case["request"] if isinstance(x, str))
    return record["model"] == "qwen2" and unicodedata.normalize("NFC", text) != text


@pytest.mark.parametrize("record", RECORDS, ids=NAMES)
def test_answers_equal_those_of_the_model_of_hugging_face(folders, record):
    model = HarnessModel(str(folders[record["model"]]), batch_size=8, **record["arguments"])
    for chat in record["chats"]:
        text = model.apply_chat_template(chat["chat"], chat["add_generation_prompt"])
        assert text == chat["text"]
    cases = {
        kind: [x for x in record[kind] if "answer" in x and not normalized(x, record)]
        for kind in ("loglikelihood", "loglikelihood_rolling", "generate_until")
    }
    pairs = cases["loglikelihood"]
    found = model.loglikelihood(made(x["request"] for x in pairs))
    for case, (value, greedy) in zip(pairs, found, strict=True):
        assert value == pytest.approx(case["answer"][0], rel=1e-4, abs=1e-4), case
        assert greedy == case["answer"][1], case
    documents = cases["loglikelihood_rolling"]
    found = model.loglikelihood_rolling(made(x["request"] for x in documents))
    np.testing.assert_allclose(found, [x["answer"] for x in documents], rtol=1e-4, atol=1e-4)
    generations = cases["generate_until"]
    found = model.generate_until(made(x["request"] for x in generations))
    for case, text in zip(generations, found, strict=True):
        assert text == case["answer"], case


def test_continuations_without_own_tokens_are_refused(folders):
    refused = [x["request"] for x in RECORDS[0]["loglikelihood"] if "error" in x]
    assert ["i", "s"] in refused
    assert ["is", ""] in refused
    model = HarnessModel(str(folders["qwen2"]))
    for request in refused:
        with pytest.raises(UserError, match=r"the continuation .* has no token of its own"):
            model.loglikelihood(made([request]))


def test_blank_contexts_are_the_prefix_token(folders):
    model = HarnessModel(str(folders["gpt2"]), batch_size=2)
    pairs = [(" ", "a"), ("\n\n", "yes")]
    found = model.loglikelihood(made(pairs))
    want = model.loglikelihood_rolling(made((a + b,) for a, b in pairs))
    np.testing.assert_allclose([value for value, _ in found], want, rtol=1e-4)


def test_overlong_requests_warn_and_impossible_ones_are_named(folders):
    model = HarnessModel(str(folders["gpt2"]), batch_size=8)
    with pytest.warns(UserWarning, match="1 of 1 contexts are cut on the left, by up to"):
        model._within_max_length([(None, [5] * 50, [6])])
    with pytest.raises(UserError, match="a continuation has 41 tokens, more than the maximum"):
        model.loglikelihood(made([("is", "z" * 41)]))
    with pytest.raises(UserError, match="max_gen_toks=256: must be less than the maximum length"):
        model.generate_until(made([("is", {})]))
    with pytest.raises(UserError, match="max_length=41: the model has positions of 40 tokens"):
        HarnessModel(str(folders["gpt2"]), max_length=41)


KEYWORDS = [
    ({"max_gen_toks": 7}, {"max_new_tokens": 7}),
    ({"max_new_tokens": 7}, {"max_new_tokens": 7}),
    ({"max_tokens": 7}, {"max_new_tokens": 7}),
    ({"max_completion_tokens": 7}, {"max_new_tokens": 7}),
    ({"num_beams": 1, "do_sample": False, "top_p": 0.95, "temperature": 0.2}, {"top_k": 1}),
    ({"until": "x", "temperature": 0.0}, {"stop": ["x"], "top_k": 1}),
    ({"until": ["x", "y"], "temperature": 0.8, "top_p": 0.95}, {"temperature": 0.8, "top_p": 0.95}),
    ({"do_sample": True, "temperature": 1}, {"temperature": 1.0}),
    ({"do_sample": True}, {"temperature": 1.0}),
]


@pytest.mark.parametrize(("given", "want"), KEYWORDS)
def test_arguments_of_shipped_tasks_are_accepted(given, want):
    found = generation_options(given, 256, 0)
    assert {name: found.get(name) for name in want} == want
    assert ("key" in found) == ("top_k" not in want and "temperature" in want)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 10}, "num_beams=10: unsupported"),
        ({"num_return_sequences": 2}, "num_return_sequences=2: unsupported"),
        ({"max_length": 20}, "max_length=20: unsupported"),
        ({"do_sample": "no"}, "do_sample='no': must be true or false"),
        ({"until": [""]}, "until=.*at least 1 character"),
        ({"max_gen_toks": "many"}, "generation_kwargs: invalid literal"),
        ({"max_gen_toks": -1}, "max_gen_toks=-1: must be at least 0"),
    ],
)
def test_other_arguments_are_refused_by_name(given, message):
    with pytest.raises(UserError, match=message):
        generation_options(given, 256, 0)


def test_automatic_batch_sizes_are_accepted():
    assert [batch_size_of(x, None) for x in ("auto", "auto:4", "3", 2)] == [16, 16, 3, 2]
    assert batch_size_of("auto", 8) == 8
    for wrong in ("auto:", "auto:x", "0", "-1", "automatic"):
        with pytest.raises(UserError, match=f"batch_size={wrong}"):
            batch_size_of(wrong, None)
