"""Odd requests of the lm-evaluation-harness: equal to its own model's answers, or refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from lm_eval.api.instance import Instance

from heinsen_jax.data import load_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.interop.harness import HarnessModel
from heinsen_jax.interop.harness_batches import windows
from heinsen_jax.interop.harness_options import generation_options, positive_or_auto
from heinsen_jax.interop.transformers import import_model

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
GOLDEN = Path(__file__).parents[1] / "golden"
CASES = json.loads((GOLDEN / "harness/answers.json").read_text())
KINDS = "loglikelihood", "loglikelihood_rolling", "generate_until"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Imported checkpoints by name."""
    folders = {}
    for name in ("qwen2", "gpt2"):
        original = tmp_path_factory.mktemp(name)
        shutil.copytree(GOLDEN / "transformers" / name, original, dirs_exist_ok=True)
        if (GOLDEN / "harness" / name).exists():
            shutil.copytree(GOLDEN / "harness" / name, original, dirs_exist_ok=True)
        folders[name] = str(import_model(str(original), tmp_path_factory.mktemp("run") / name))
    return folders


def request(kind: Any, arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=tuple(arguments), idx=0)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        pytest.param(
            case,
            kind,
            id=f"{case['checkpoint']}{case['options']}-{kind}",
            marks=[pytest.mark.nightly] * (case["checkpoint"] == "gpt2" and kind != KINDS[0]),
        )
        for case in CASES
        for kind in KINDS
    ],
)
def test_answers_equal_the_harness_own_model(folders, case, kind):
    model = HarnessModel(folders[case["checkpoint"]], **case["options"])
    asked = [
        (args, want) for name, args, want in case["answers"] if name == kind and want is not None
    ]
    answers = getattr(model, kind)([request(kind, args) for args, _ in asked])
    wrong = []
    for (args, want), answer in zip(asked, answers, strict=True):
        if kind == "loglikelihood":
            expected = [pytest.approx(want[0], rel=1e-4, abs=1e-4), want[1]]
        else:
            expected = want if isinstance(want, str) else pytest.approx(want, rel=1e-4, abs=1e-4)
        if expected != (list(answer) if isinstance(answer, tuple) else answer):
            wrong.append((args, answer, want))
    assert asked
    assert not wrong, "\n".join(map(repr, wrong))


def test_refused_by_the_harness_own_model(folders):
    """Requests that end it with an error have answers that are not certain, or are refused."""
    for case in CASES[:1] + CASES[3:4]:
        model = HarnessModel(folders[case["checkpoint"]], **case["options"])
        asked = [args for name, args, want in case["answers"] if name == KINDS[0] and want is None]
        for args in asked:
            if "".join(args) and (args[1] or not args[0].strip()):
                ((value, _),) = model.loglikelihood([request(KINDS[0], args)])
                assert value < 0, args
            else:
                with pytest.raises(UserError, match="continuation '' after context"):
                    model.loglikelihood([request(KINDS[0], args)])


def test_a_subclass_need_not_set_a_maximum_length():
    assert HarnessModel.__new__(HarnessModel).requested_length is None


def test_a_token_across_the_join_is_not_certain(folders):
    model = HarnessModel(folders["qwen2"])
    (join, _), (other, _) = model.loglikelihood([request(KINDS[0], ("i", x)) for x in "sd"])
    assert join < 0
    assert other < 0


@pytest.mark.parametrize(
    ("context", "continuation", "parts"),
    [
        ([7, 8], [1, 2], [([7, 8], [1, 2])]),
        ([5, 6, 7, 8], [1, 2], [([6, 7, 8], [1, 2])]),
        ([7, 8], [1, 2, 3, 4, 5, 6], [([8], [1, 2, 3, 4]), ([2, 3, 4], [5, 6])]),
    ],
)
def test_long_continuations_are_scored_in_parts(context, continuation, parts):
    assert windows(context, continuation, 4) == parts
    assert windows(context, continuation, None) == [(context, continuation)]


@pytest.mark.parametrize("chat", json.loads((GOLDEN / "harness/chats.json").read_text()))
def test_chats_equal_the_harness_own_model(folders, chat):
    model = HarnessModel.__new__(HarnessModel)
    model.folder, model.encoding = folders["qwen2"], load_tokenizer(folders["qwen2"])
    options = {"add_generation_prompt": chat["add_generation_prompt"]}
    assert model.apply_chat_template(chat["messages"], **options) == chat["text"]


GREEDY = {"stop": ["<eos>"], "max_new_tokens": 9, "top_k": 1}
OPTIONS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"until": []}, {}),
    ({"until": "\n"}, {"stop": ["\n", "<eos>"]}),
    ({"until": ["\n", "<eos>"]}, {"stop": ["\n", "<eos>"]}),
    ({"max_gen_toks": 3, "max_new_tokens": 5}, {"max_new_tokens": 3}),
    ({"max_new_tokens": 5, "num_beams": 1}, {"max_new_tokens": 5}),
    ({"max_tokens": 5}, {"max_new_tokens": 5}),
    ({"max_completion_tokens": "5"}, {"max_new_tokens": 5}),
    ({"do_sample": False, "temperature": 1, "top_p": 0.95}, {}),
    ({"do_sample": False, "temperature": 0.0}, {}),
    ({"do_sample": True, "temperature": 0}, {}),
    ({"temperature": None, "repetition_penalty": 1.0}, {}),
]


SHIPPED: dict[str, list] = {
    "do_sample": [False, True],
    "temperature": [0, 0.0, 0.2, 0.7, 0.8, 1],
    "top_p": [0.95],
    "num_beams": [1],
    "until": [[], ["\n", "Q:"]],
    "max_gen_toks": [3, 32768],
    "max_new_tokens": [16, 256],
}
"""Values of `generation_kwargs` in the tasks of lm-eval 0.4.13, except for one with 10 beams."""


@pytest.mark.parametrize("do_sample", [None, False, True])
def test_options_of_shipped_tasks_are_accepted(do_sample):
    keywords = {"max_new_tokens": 9, "max_length": None, "end_of_text": ""}
    for name, values in SHIPPED.items():
        for value in values:
            given = {"do_sample": do_sample, name: value}
            options = generation_options(given, 0, **keywords)
            is_random = given["do_sample"] or (do_sample is None and given.get("temperature"))
            is_random = is_random and given.get("temperature") not in (0, 0.0)
            assert ("key" in options) == bool(is_random)


@pytest.mark.parametrize(("given", "change"), OPTIONS)
def test_options_of_tasks(given, change):
    keywords = {"max_new_tokens": 9, "max_length": None, "end_of_text": "<eos>"}
    assert generation_options(given, 0, **keywords) == GREEDY | change


@pytest.mark.parametrize("given", [{"do_sample": True}, {"temperature": 0.2, "top_p": 0.95}])
def test_sampling_options_of_tasks(given):
    keywords = {"max_new_tokens": 9, "max_length": None, "end_of_text": ""}
    options: Any = generation_options(given, 0, **keywords)
    assert "key" in options
    assert options["temperature"] == given.get("temperature", 1.0)
    assert options["top_p"] == given.get("top_p")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_beams": 10}, "num_beams=10: unsupported; set it to 1"),
        ({"length_penalty": 2.0}, "length_penalty=2.0: unknown argument; choose from until"),
        ({"until": ["a", ""]}, "until=.*: must be a text or a list of texts that are not empty"),
        ({"until": 3}, "until=3: must be"),
        ({"max_tokens": "many"}, "max_tokens='many': must be an integer >= 1"),
        ({"temperature": "hot", "do_sample": True}, "temperature='hot': must be a number"),
        ({"temperature": 0.5, "seed": "s"}, "seed='s': must be a number"),
        ({"max_tokens": 40}, "max_gen_toks=40: must be less than max_length=40"),
    ],
)
def test_unsupported_options_of_tasks_are_named(given, message):
    keywords = {"max_new_tokens": 9, "max_length": 40, "end_of_text": ""}
    with pytest.raises(UserError, match=rf"generation_kwargs\.{message}"):
        generation_options(given, 0, **keywords)


@pytest.mark.parametrize("size", ["auto", "auto:4", 16, "16"])
def test_automatic_batch_sizes_are_accepted(size):
    assert positive_or_auto(size, "batch_size", 16) == 16
