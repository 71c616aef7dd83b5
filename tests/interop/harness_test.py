"""The lm-evaluation-harness, on tasks from local files and without network, against a plain
computation of one sequence at a time."""

import dataclasses
import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from lm_eval.api.instance import Instance
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from heinsen_jax import evaluate
from heinsen_jax.data import get_tokenizer
from heinsen_jax.errors import UserError
from heinsen_jax.generate import Engine, generate
from heinsen_jax.interop import harness
from heinsen_jax.interop.harness import HarnessModel
from heinsen_jax.runs.load import load_run
from tests.models.mechanisms_test import build
from tests.models.small import random_model

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning"
    ),  # warnings of the harness and its dependencies
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
WORDS = ["attention", "constant", "cost", "exact", "value", "where", "overflow"]


def request(kind: str, *arguments) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


ADAPTERS = "trained", "softmax", "learned positions"


@pytest.fixture(
    scope="module",
    params=["trained", pytest.param("softmax", marks=pytest.mark.nightly), "learned positions"],
)
def adapter(request, run):
    """Adapter of the run's model, or of one with random weights and a cache; and its `reference`,
    the model itself."""
    found = HarnessModel(str(run), batch_size=3)
    found.reference, _, _ = load_run(run)
    if request.param != "trained":
        fields: dict[str, Any] = {"attention": "softmax"}
        if request.param == "learned positions":
            fields |= {"positions": "learned", "max_length": 48}
        found.reference = random_model(dataclasses.replace(found.engine.config, **fields))
        found.engine = Engine(found.reference, found.encoding)
    return found


trained_or_nightly = pytest.mark.parametrize(
    "adapter",
    ["trained", *(pytest.param(x, marks=pytest.mark.nightly) for x in ADAPTERS[1:])],
    indirect=True,
)


@pytest.fixture(scope="module", autouse=True)
def own_tasks_only():
    """The index of all tasks of the harness needs long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "TaskManager", partial(TaskManager, include_defaults=False))
        yield


@partial(jax.jit, static_argnums=0)
def forward(graph, parameters, tokens):
    return nnx.merge(graph, parameters)(tokens)


def log_p(adapter, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Process one sequence in one pass, padded at the end to few lengths."""
    tokens = np.array([*context, *continuation])[:-1]
    size = adapter.engine.config.max_length or 64
    padded = np.pad(tokens, (0, -len(tokens) % size))
    logits = forward(*nnx.split(adapter.reference), padded)
    logits = np.asarray(logits, np.float64)[len(context) - 1 : len(tokens)]
    logits = logits - logits.max(-1, keepdims=True)
    each = logits - np.log(np.sum(np.exp(logits), -1, keepdims=True))
    said = np.argmax(logits[:, : adapter.encoding.vocab_size], -1)
    values = np.take_along_axis(each, np.array(continuation)[:, None], -1)
    return float(values.sum()), bool(np.all(said == continuation))


@pytest.mark.parametrize("share", [True, False])
def test_only_the_tokens_of_continuations_are_scored(share, monkeypatch):
    """Each token has its own log p, so that a sum tells which tokens it is of."""
    adapter = HarnessModel.__new__(HarnessModel)
    adapter.batch_size, adapter.share = 3, share
    adapter.engine = SimpleNamespace(config=SimpleNamespace(max_length=None))

    def predict(given, wanted, state):
        log_p, is_likeliest = np.zeros((3, 8)), np.zeros((3, 8), bool)
        for row, tokens in enumerate(wanted):
            log_p[row, : len(tokens)] = -(10.0 ** np.array(tokens))
            is_likeliest[row, : len(tokens)] = np.array(tokens) < 4
        return log_p, is_likeliest, state

    monkeypatch.setattr(adapter, "_states_after", lambda contexts, more: None)
    monkeypatch.setattr(adapter, "_predict", predict)
    monkeypatch.setattr(harness, "select_rows", lambda state, rows: state)
    pairs = [([5, 1], [2, 3]), ([5, 1], [4]), ([0], [1, 2, 3]), ([6, 5, 0], [5])]
    expected = [(-1100.0, True), (-10000.0, False), (-1110.0, True), (-100000.0, False)]
    assert adapter._score(pairs) == expected


@pytest.mark.parametrize(
    ("start", "special", "expected"),
    [(7, True, [7, 97]), (7, False, [97]), (7, None, [97]), (97, True, [97])],
)
def test_texts_begin_once_with_the_start_token(start, special, expected, monkeypatch):
    adapter = HarnessModel.__new__(HarnessModel)
    adapter.encoding = get_tokenizer("bytes")
    monkeypatch.setattr(HarnessModel, "_bos", [start])
    assert adapter.tok_encode("a", add_special_tokens=special) == expected


def test_continuations_equal_one_pass_each(adapter):
    rng = np.random.default_rng(0)
    pairs = []
    for length in (0, 1, 5, 40, 9):
        context = " ".join(rng.choice(WORDS, length))[:length]
        pairs += [(context, " " + " ".join(rng.choice(WORDS, 1))) for _ in range(4)]
    pairs = [pairs[i] for i in rng.permutation(len(pairs))]
    pairs = [pair for pair in pairs if len("".join(pair)) < 48]
    found = adapter.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    for (context, continuation), (value, said) in zip(pairs, found, strict=True):
        tokens = adapter.tok_encode(context) or [adapter.eot_token_id]
        _, others = adapter._encode_pair(context, continuation) if context else (0, None)
        others = others or adapter.tok_encode(continuation)
        tokens = adapter.tok_encode(context.rstrip()) if context else tokens
        want, want_said = log_p(adapter, tokens, others)
        assert value == pytest.approx(want, abs=2e-4)
        assert said == want_said


@trained_or_nightly
def test_greedy_continuations_are_detected(adapter):
    context = "attention is"
    tokens = jnp.asarray(adapter.tok_encode(context))
    new = generate(adapter.engine, tokens, 4, top_k=1, num_tokens=adapter.encoding.vocab_size)
    said = adapter._loglikelihood_tokens([(None, tokens.tolist(), new.tolist())])
    other = adapter._loglikelihood_tokens([(None, tokens.tolist(), [*new.tolist()[:3], 7])])
    assert (said[0][1], other[0][1]) == (True, False)


def test_every_context_is_processed_once(run, monkeypatch):
    read = []
    real = HarnessModel._states_after

    def counted(self, contexts, more):
        read.extend(map(tuple, contexts))
        return real(self, contexts, more)

    monkeypatch.setattr(HarnessModel, "_states_after", counted)
    requests = [
        request("loglikelihood", c, f" {w}") for w in WORDS for c in ("where is", "cost in")
    ]
    shared = HarnessModel(str(run), batch_size=3).loglikelihood(requests)
    assert len(read) == len({*read}) == 2
    read.clear()
    apart = HarnessModel(str(run), batch_size=3, share=False).loglikelihood(requests)
    assert len(read) == len(requests)
    for one, other in zip(shared, apart, strict=True):
        assert one[0] == pytest.approx(other[0], abs=1e-4)


@pytest.mark.nightly
def test_long_documents_are_one_stream(run, monkeypatch):
    monkeypatch.setattr(harness, "CHUNK", 64)
    rng = np.random.default_rng(1)
    texts = [" ".join(rng.choice(WORDS, number)) for number in (1, 30, 4)] + [""]
    adapter = HarnessModel(str(run), batch_size=3)
    adapter.reference, _, _ = load_run(run)
    requests = [request("loglikelihood_rolling", text) for text in texts]
    found = adapter.loglikelihood_rolling(requests)
    for text, value in zip(texts, found, strict=True):
        tokens = adapter.tok_encode(text)
        want = log_p(adapter, [adapter.eot_token_id], tokens)[0] if tokens else 0.0
        assert value == pytest.approx(want, abs=1e-3)


@pytest.mark.parametrize("adapter", ["learned positions"], indirect=True)
def test_with_learned_positions_every_token_is_counted_once(adapter):
    text = " ".join(WORDS * 4)
    tokens, max_length = adapter.tok_encode(text), adapter.engine.config.max_length
    (found,) = adapter.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    whole, want, done = [adapter.eot_token_id, *tokens], 0.0, 0
    while done < len(tokens):
        end = min(done + max_length, len(tokens))
        start = max(0, end - max_length)
        want += log_p(adapter, whole[start : done + 1], whole[done + 1 : end + 1])[0]
        done = end
    assert found == pytest.approx(want, abs=1e-3)
    context, continuation = adapter._encode_pair(text, " where")
    (cut, _), *_ = adapter.loglikelihood([request("loglikelihood", text, " where")])
    want, _ = log_p(adapter, context[len(continuation) - 49 :], continuation)
    assert cut == pytest.approx(want, abs=1e-3)


@pytest.mark.nightly
@trained_or_nightly
def test_samples_end_at_stop_strings(adapter):
    contexts = ["attention", "constant in cost", "w"]
    tokens = [adapter.tok_encode(context) for context in contexts]
    lengths = [*map(len, tokens)]
    padded = np.array([np.pad(row, (0, max(lengths) - len(row))) for row in tokens])
    options = {"top_k": 1, "num_tokens": adapter.encoding.vocab_size, "lengths": lengths}
    new = generate(adapter.engine, padded, 20, **options).tolist()
    greedy = {"until": ["s", "\n"], "max_gen_toks": 20}
    zero = {"until": "s", "do_sample": True, "temperature": 0, "max_gen_toks": 5}
    for given, number, stops in ((greedy, 20, ["s", "\n"]), (zero, 5, ["s"])):
        found = adapter.generate_until([request("generate_until", c, given) for c in contexts])
        for row, text in zip(new, found, strict=True):
            whole = adapter.encoding.decode(row[:number]).split("<|endoftext|>")[0]
            places = [whole.find(each) for each in stops if each in whole]
            assert text == whole[: min(places, default=len(whole))]
    sampled = {"until": "\n", "do_sample": True, "temperature": 0.9, "max_gen_toks": 5}
    requests = [request("generate_until", "where", sampled | {"seed": seed}) for seed in (1, 2)]
    assert len({*adapter.generate_until(requests)}) == 2
    again = request("generate_until", "where", sampled)
    assert len({*adapter.generate_until([again] * 5)}) > 1  # as often as requested
    with pytest.raises(UserError, match=r"generation_kwargs\.num_beams=2: unsupported"):
        adapter.generate_until([request("generate_until", "a", {"num_beams": 2})])


TASKS = {
    "words_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}],
    },
    "words_perplexity": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "bits_per_byte"}],
    },
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """Return a folder of two tasks with their examples."""
    folder = tmp_path_factory.mktemp("tasks")
    rng = np.random.default_rng(2)
    documents = []
    for _ in range(12):
        choices = [*map(str, rng.choice(WORDS, 3, replace=False))]
        question = " ".join(rng.choice(WORDS, 3))
        documents.append({"question": question, "choices": choices, "answer": int(rng.integers(3))})
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, documents)))
    files = {"data_files": {"test": str(folder / "words.jsonl")}}
    for name, task in TASKS.items():
        task = {"task": name, "dataset_path": "json", "dataset_kwargs": files, **task}
        (folder / f"{name}.yaml").write_text(json.dumps(task | {"test_split": "test"}))
    return folder, documents


def test_tasks_of_files(run, tasks, tmp_path, monkeypatch, capsys):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    folder, documents = tasks
    arguments = ["--workdir", str(run), "--include-path", str(folder), "--batch-size", "3"]
    output = tmp_path / "results.json"
    arguments += ["--output", str(output), "--tasks", *TASKS]
    monkeypatch.setattr(sys, "argv", ["evaluate", *arguments])
    assert evaluate.main() == 0
    assert "words_choice" in capsys.readouterr().out

    adapter = HarnessModel(str(run))
    adapter.reference, _, _ = load_run(run)
    right, total, length = 0, 0.0, 0
    for document in documents:
        context = adapter.tok_encode(document["question"])
        values = [
            log_p(adapter, context, adapter.tok_encode(f" {x}"))[0] for x in document["choices"]
        ]
        right += int(np.argmax(values)) == document["answer"]
        total += log_p(adapter, [adapter.eot_token_id], context)[0]
        length += len(document["question"].encode())
    results = json.loads(output.read_text())
    assert results["words_choice"]["acc,none"] == pytest.approx(right / 12)
    bits = results["words_perplexity"]["bits_per_byte,none"]
    assert bits == pytest.approx(-total / length / np.log(2), rel=1e-5)


@pytest.mark.nightly
def test_tasks_of_the_harness_are_known():
    assert TaskManager().match_tasks(["arc_easy"]) == ["arc_easy"]


def test_by_its_name_in_the_harness(run, tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    manager = harness.TaskManager(include_path=str(tasks[0]))
    arguments = f"workdir={run},batch_size=3"
    results = simple_evaluate(
        "heinsen_jax", model_args=arguments, tasks=["words_choice"], task_manager=manager, limit=3
    )
    assert results["n-samples"]["words_choice"]["effective"] == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workdir": None}, "workdir is missing; give workdir=FOLDER"),
        ({"device": "cuda", "dtype": "half"}, "model_args dtype: Input should be 'float32'"),
        ({"batch_size": "automatic"}, "batch_size=automatic: must be an integer >= 1, auto or"),
        ({"max_length": "0"}, "max_length=0: must be an integer >= 1"),
        ({"add_bos_token": True}, "add_bos_token=True: the tokenizer of .* has no bos_token"),
        ({"batch_size": 0}, "batch_size=0"),
    ],
)
def test_bad_arguments_are_named(run, change, message):
    with pytest.raises(UserError, match=message):
        HarnessModel(**{"workdir": str(run)} | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "nonsense_of_mine"], "--tasks nonsense_of_mine: unknown task"),
        (["--tasks", "x", "--include-path", "nowhere"], "--include-path nowhere: not a folder"),
        (["--tasks", "x", "--data", "text"], "--data text is unsupported with --tasks"),
        (["--limit", "3"], "--limit 3 needs --tasks; leave it out"),
        (["--tasks", "x", "--limit", "0"], "--limit 0 must be at least 1"),
        (["--tasks", "x", "--batch-size", "0"], "--batch-size 0 must be at least 1"),
        (["--tasks", "x", "--num-fewshot=-1"], "--num-fewshot -1 must not be negative"),
        (["--tasks", "x", "--output", "no/x.json"], "--output no/x.json: folder no does not exist"),
    ],
)
def test_unknown_tasks_are_named(run, arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evaluate", "--workdir", str(run), *arguments])
    assert evaluate.main() == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("place", ["missing/repository", "json"])
def test_unavailable_data_are_named(run, place, tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    files = {"data_files": {"test": str(tmp_path / "nowhere.jsonl")}} if place == "json" else {}
    task = {"task": "away", "dataset_path": place, "dataset_kwargs": files, "test_split": "test"}
    (tmp_path / "away.yaml").write_text(json.dumps(TASKS["words_perplexity"] | task))
    with pytest.raises(
        UserError, match=r"--tasks away: the data .* \(.*(missing/repository|nowhere)"
    ):
        harness.run_tasks({"workdir": str(run)}, tasks=["away"], include_path=tmp_path)


def test_without_the_harness_the_extra_is_named(run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    monkeypatch.delitem(sys.modules, "heinsen_jax.interop.harness")
    monkeypatch.setattr(sys, "argv", ["evaluate", "--workdir", str(run), "--tasks", "x"])
    assert evaluate.main() == 2
    assert "pip install 'heinsen_jax[harness]'" in capsys.readouterr().err


def test_tokenizers_without_chat_templates_are_named(run):
    with pytest.raises(UserError, match=r"--apply_chat_template: the tokenizer of .* has no chat"):
        HarnessModel(str(run)).apply_chat_template([{"role": "user", "content": "hi"}])


def test_the_model_of_a_run_is_loaded(run):
    adapter, (model, _, step) = HarnessModel(str(run)), load_run(run)
    assert adapter.get_model_info()["model_step"] == step
    size = sum(x.size for x in jax.tree.leaves(model))
    assert adapter.get_model_info()["model_num_parameters"] == size
    tokens = np.arange(5)
    logits, _ = adapter.engine.feed(tokens)
    np.testing.assert_allclose(logits, model(tokens)[-1], atol=1e-4)


def test_a_subclass_may_set_the_model():
    adapter = HarnessModel.__new__(HarnessModel)
    adapter.model, adapter.encoding = build("log", vocab_size=264), get_tokenizer("bytes")
    assert adapter.engine.config is adapter.model.config
    assert adapter.max_length is None
