"""Adapter of trained models to EleutherAI's lm-evaluation-harness, named `heinsen_jax`.

python -m heinsen_jax.evaluate --workdir runs/quickstart --tasks NAME ... [--include-path FOLDER]
python -m heinsen_jax.interop.harness --model heinsen_jax --model_args workdir=DIR --tasks NAME ...

The second is the harness's own command line, with this model registered; in Python, importing this
module registers it for `lm_eval.simple_evaluate(model="heinsen_jax", ...)`. Needs
`pip install 'heinsen_jax[harness]'`.
"""

import collections
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Required, TypeAlias, TypedDict, runtime_checkable

import jax
import numpy as np
from flax import nnx

from heinsen_jax.attention.cache import bucket
from heinsen_jax.data import start_ids
from heinsen_jax.data.tokenizer_pretrained import DEFAULT, PretrainedTokenizer
from heinsen_jax.errors import UserError, command_line, without_extra
from heinsen_jax.generate import complete
from heinsen_jax.generate.states import has_independent_rows, init_rows, select_rows
from heinsen_jax.interop.harness_batches import (
    SMALLEST,
    batches,
    padded,
    padded_row,
    predict,
    read_contexts,
)
from heinsen_jax.models import LanguageModelState
from heinsen_jax.training.checkpoint import load_text_run
from heinsen_jax.typing import JSON, Array, Key

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.result_schema import EvalResults
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table
except ImportError as missing:
    raise without_extra(missing, "harness", __name__) from missing

CHUNK = 512  # tokens of a document per forward pass
GIVEN, WANTED = slice(None, -1), slice(1, None)

Request: TypeAlias = tuple[tuple[str, str] | None, list[int], list[int]]
"""Text and tokens of a context and its continuation."""


@runtime_checkable
class Instance(Protocol):
    """Request (`lm_eval.api.instance.Instance`), whose arguments depend on its kind."""

    @property
    def args(self) -> tuple: ...


class CompleteKeywords(TypedDict, total=False):
    """Keyword arguments of `complete`."""

    stop: Required[list[str]]
    max_new_tokens: Required[int]
    top_k: int | None
    top_p: float | None
    temperature: float
    key: Key[Array, ""]


class HarnessModel(TemplateLM):
    """Language model of a run or of a hub folder, with the interface of the harness.

    A context is processed once for all continuations that are compared after it, and only its state
    is kept. Documents are processed as one stream of any length; with trained position embeddings,
    tokens attend to at most `max_length` tokens.

    Args:
      workdir: folder of a run or of a saved model; `pretrained` is an alias.
      batch_size: sequences per batch.
      max_gen_toks: maximum number of generated tokens, unless the task sets it.
      latest: whether to load the latest checkpoint instead of the best one.
      share: whether contexts are processed once; otherwise each continuation is processed together
        with its context, for comparison.
    """

    def __init__(
        self,
        workdir: str | None = None,
        pretrained: str | None = None,
        batch_size: int | str = 16,
        max_gen_toks: int | str = 256,
        latest: bool = False,
        share: bool = True,
        **unknown: JSON,
    ) -> None:
        super().__init__()
        self.folder = workdir or pretrained
        if self.folder is None:
            raise UserError(
                "model_args: workdir is missing; give workdir=FOLDER of a run or of a saved model"
            )
        given = {name for name, x in unknown.items() if x is not None}
        if strange := given - {"max_batch_size", "device"}:
            raise UserError(
                f"model_args {min(strange)}={unknown[min(strange)]!r}: unknown argument; choose "
                "from workdir, batch_size, max_gen_toks, latest, share"
            )
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UserError(f"batch_size={batch_size}: must be an integer >= 1")
        self.batch_size, self.max_gen_toks, self.share = int(batch_size), int(max_gen_toks), share
        self.model, self.encoding, self.step = load_text_run(self.folder, best=not latest)
        if not self.model.config.is_causal:
            raise UserError(
                f"{self.folder}: the model is not causal; choose a causal language model"
            )
        self.graph, self.parameters = nnx.split(self.model)

    @property
    def eot_token_id(self) -> int:
        return self.encoding.end_of_text_id

    @property
    def prefix_token_id(self) -> int:
        """The token before documents whose complete likelihood is measured."""
        return next(iter(start_ids(self.encoding)), self.eot_token_id)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer and its chat templates, for the harness's cache of requests."""
        content = json.dumps([self.encoding.fingerprint, {**self._templates}])
        return f"{self.encoding.name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    def get_model_info(self) -> dict[str, int]:
        """Return the metadata that the harness writes with its results."""
        sizes = jax.tree.map(lambda x: x.size, self.parameters)
        return {"model_num_parameters": sum(jax.tree.leaves(sizes)), "model_step": self.step}

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation in the template of the tokenizer, for `--apply_chat_template`.

        Raises:
          UserError: the tokenizer has no template, or the template refuses the conversation.
        """
        if DEFAULT not in self._templates:
            raise UserError(
                f"--apply_chat_template: the tokenizer of {self.folder} has no chat template; "
                "leave it out"
            )
        assert isinstance(self.encoding, PretrainedTokenizer)
        return self.encoding.render_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The template, for the record of the harness."""
        if chat_template not in (True, False, DEFAULT):
            raise UserError(
                f"--apply_chat_template {chat_template}: templates cannot be chosen by name; leave "
                "the name out"
            )
        return self._templates.get(DEFAULT) if chat_template else None

    @property
    def _templates(self) -> Mapping[str, str]:
        tokenizer = self.encoding
        return tokenizer.templates if isinstance(tokenizer, PretrainedTokenizer) else {}

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: JSON
    ) -> list[int]:
        """Encode a text as transformers does: special tokens of an imported model may be written in
        it, and those with which documents start precede it, unless it begins with them."""
        tokenizer = self.encoding
        if isinstance(tokenizer, PretrainedTokenizer):
            ids = tokenizer.encode_with_special_tokens(string)
        else:
            ids = [*tokenizer.encode(string)]
        start = [] if add_special_tokens is False else [*start_ids(tokenizer)]
        return ids if ids[: len(start)] == start else [*start, *ids]

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **unused: JSON
    ) -> list[tuple[float, bool]]:
        """Return (log p, whether greedy decoding yields it) of continuations after contexts."""
        del unused
        self._check_lengths([context + continuation for _, context, continuation in requests])
        cut = [self._cut(context, continuation) for _, context, continuation in requests]
        found = [(math.nan, False)] * len(requests)
        groups: dict[tuple[int, ...] | int, list[int]] = {}
        for number, (before, _) in enumerate(cut):
            groups.setdefault(before if self.share else number, []).append(number)
        longest_first = sorted(groups.values(), key=lambda numbers: -len(cut[numbers[0]][0]))
        for some in batches(self.batch_size, longest_first):
            numbers = [number for group in some for number in group]
            place = {number: row for row, group in enumerate(some) for number in group}
            more = max(len(cut[number][1]) for number in numbers)
            state = self._states_after([[*cut[group[0]][0]] for group in some], more)
            for part in batches(self.batch_size, numbers):
                given, wanted = ([cut[n][1][where] for n in part] for where in (GIVEN, WANTED))
                rows = padded_row([place[n] for n in part], self.batch_size)
                log_p, is_likeliest, _ = self._predict(given, wanted, select_rows(state, rows))
                for row, number in enumerate(part):
                    end = len(cut[number][1]) - 1
                    counted = slice(end - len(requests[number][2]), end)
                    value = float(np.sum(log_p[row, counted], dtype=np.float64))
                    found[number] = value, bool(np.all(is_likeliest[row, counted]))
                    if (texts := requests[number][0]) is not None:
                        self.cache_hook.add_partial("loglikelihood", texts, found[number])
        return found

    def _cut(
        self, context: list[int], continuation: list[int]
    ) -> tuple[tuple[int, ...], list[int]]:
        """Split requests into shared prefixes and the remaining tokens. Nothing is shared if
        padding could exceed the model's positions."""
        if not self.share or self.model.config.max_length is not None:
            return (), context + continuation
        return tuple(context[:-1]), context[-1:] + continuation

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of documents, each after the end-of-text token."""
        del disable_tqdm
        texts = [self.tok_encode(request.args[0], add_special_tokens=False) for request in requests]
        max_length = self.model.config.max_length
        found = self._streamed(texts) if max_length is None else self._windowed(texts, max_length)
        for request, value in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return found

    def _streamed(self, texts: list[list[int]]) -> list[float]:
        found = np.zeros(len(texts))
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for part in batches(self.batch_size, order):
            longest = len(texts[part[0]])
            chunk = min(CHUNK, bucket(longest, SMALLEST))
            state, _ = init_rows(self.model, self.batch_size, -(-longest // chunk) * chunk)
            for start in range(0, longest, chunk):
                here = slice(start, start + chunk)
                given = [([self.prefix_token_id, *texts[number]])[here] for number in part]
                wanted = [texts[number][here] for number in part]
                given = [row[: len(other)] for row, other in zip(given, wanted, strict=True)]
                log_p, _, state = self._predict(given, wanted, state, chunk)
                for row, number in enumerate(part):
                    found[number] += np.sum(log_p[row, : len(wanted[row])], dtype=np.float64)
        return found.tolist()

    def _windowed(self, texts: list[list[int]], length: int) -> list[float]:
        """Split tokens into windows of at most `max_length`, with at least half of it as
        context."""
        windows, of = [], []
        for number, text in enumerate(texts):
            for window in get_rolling_token_windows(
                text, self.prefix_token_id, length, length // 2 + 1
            ):
                windows.append((None, *make_disjoint_window(window)))
                of.append(number)
        found = np.zeros(len(texts))
        for number, (log_p, _) in zip(of, self._loglikelihood_tokens(windows), strict=True):
            found[number] += log_p
        return found.tolist()

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate text after contexts, greedily unless a task sets do_sample."""
        del disable_tqdm
        found = [""] * len(requests)
        repetitions: collections.Counter[tuple[str, str]] = collections.Counter()
        alike: dict[tuple[str, int], list[int]] = {}
        for number, request in enumerate(requests):
            context, options = request.args[0], repr(sorted(request.args[1].items()))
            alike.setdefault((options, repetitions[context, options]), []).append(number)
            repetitions[context, options] += 1
        for (_, repetition), numbers in alike.items():
            options = self._options(requests[numbers[0]].args[1], repetition)
            for part in batches(self.batch_size, numbers):
                encoded = (self.tok_encode(requests[number].args[0]) for number in part)
                contexts = [tokens or [self.prefix_token_id] for tokens in encoded]
                texts = complete(self.model, self.encoding, contexts, **options)
                for number, (text,) in zip(part, texts, strict=True):
                    found[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _options(self, given: Mapping[str, Any], repetition: int) -> CompleteKeywords:
        """Return the keyword arguments of `complete` for a task's settings; repeated requests draw
        different samples."""
        given = dict(given)
        until = given.pop("until", None) or []
        stop = [until] if isinstance(until, str) else [*until]
        max_new_tokens = int(given.pop("max_gen_toks", self.max_gen_toks))
        temperature, top_k, top_p = map(given.pop, ("temperature", "top_k", "top_p"), [None] * 3)
        is_random = given.pop("do_sample", temperature not in (None, 0, 0.0))
        key = jax.random.fold_in(jax.random.key(int(given.pop("seed", 0))), repetition)
        if given:
            raise UserError(
                f"generation_kwargs.{min(given)}={given[min(given)]!r}: unknown argument; choose "
                "from until, max_gen_toks, do_sample, temperature, top_k, top_p, seed"
            )
        options: CompleteKeywords = {"stop": stop, "max_new_tokens": max_new_tokens}
        if not is_random or temperature == 0:
            return {**options, "top_k": 1}
        temperature = 1.0 if temperature is None else temperature
        return {
            **options,
            "key": key,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
        }

    def _states_after(self, contexts: list[list[int]], more: int) -> LanguageModelState:
        """Return the states after contexts, which may be empty, with capacity for more tokens."""
        tokens = padded(contexts, self.batch_size)[:, : self.model.config.max_length]
        lengths = padded_row([len(context) for context in contexts], self.batch_size)
        capacity = tokens.shape[1] + bucket(more, SMALLEST)
        state, independent_rows = init_rows(self.model, self.batch_size, capacity)
        return read_contexts(self.graph, self.parameters, independent_rows, tokens, lengths, state)

    def _predict(
        self,
        given: list[list[int]],
        wanted: list[list[int]],
        state: LanguageModelState,
        length: int = SMALLEST,
    ) -> tuple[np.ndarray, np.ndarray, LanguageModelState]:
        """Return log p `[B, T]` of the tokens `wanted` after the given tokens and states, whether
        each has maximum probability, and the states after them."""
        max_length = self.model.config.max_length
        arrays = (padded(x, self.batch_size, length) for x in (given, wanted))
        tokens, targets = (x[:, :max_length] for x in arrays)
        independent_rows = has_independent_rows(self.model, state)
        options = self.graph, self.parameters, independent_rows, self.encoding.vocab_size
        log_p, is_likeliest, state = predict(*options, tokens, targets, state)
        return np.asarray(log_p), np.asarray(is_likeliest), state

    def _check_lengths(self, texts: list[list[int]]) -> None:
        longest, max_length = max(map(len, texts), default=0), self.model.config.max_length
        if max_length is not None and longest - 1 > max_length:
            raise UserError(
                f"{self.folder}: a context with its continuation has {longest} tokens, more than "
                f"model.max_length={max_length}; reduce --num_fewshot"
            )


register_model("heinsen_jax")(HarnessModel)


def run_tasks(
    model: Mapping[str, Any],
    *,
    tasks: list[str],
    include_path: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
) -> EvalResults:
    """Evaluate a model on tasks of the harness.

    Args:
      model: arguments of `HarnessModel`.
      tasks: names of tasks.
      include_path: folder with further tasks, as YAML files.
      limit: number of examples per task; all when None.
      num_fewshot: number of examples before each question; set by the task when None.

    Raises:
      UserError: a task is unknown, or its data are not available.
    """
    if include_path is not None and not include_path.is_dir():
        raise UserError(
            f"--include-path {include_path}: not a folder; give the folder of the tasks' YAML files"
        )
    manager = TaskManager(include_path=None if include_path is None else str(include_path))
    if unknown := {*tasks} - {*manager.match_tasks(tasks)}:
        raise UserError(
            f"--tasks {min(unknown)}: unknown task; choose one from `lm_eval ls tasks`, or add "
            "the folder of its YAML file by --include-path"
        )
    adapter = HarnessModel(**model)
    try:
        results = simple_evaluate(
            adapter,
            tasks=[*tasks],
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
        )
    except (ConnectionError, FileNotFoundError) as error:
        raise UserError(
            f"--tasks {' '.join(tasks)}: the data of a task are not available from the "
            f"Hugging Face Hub or a file ({' '.join(str(error).split())}); check its YAML"
        ) from error
    assert results is not None  # None only on processes other than the first
    return results


def table(results: EvalResults) -> str:
    """Format results as text."""
    return make_table(results)


@command_line
def main() -> None:
    cli_evaluate()


if __name__ == "__main__":
    raise SystemExit(main())
