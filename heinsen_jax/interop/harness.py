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
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

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
from heinsen_jax.typing import JSON

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.result_schema import EvalResults
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window, make_table

    from heinsen_jax.interop.harness_options import batch_size_of, generation_options
except ImportError as missing:
    raise without_extra(missing, "harness", __name__) from missing

CHUNK = 512  # tokens of a document per forward pass
CONTINUED = "<<the answer continues here>> "
"""Mark of the end of an answer's beginning. Templates that trim messages remove its space."""
GIVEN, WANTED = slice(None, -1), slice(1, None)

Request: TypeAlias = tuple[tuple[str, str] | None, list[int], list[int]]
"""Text and tokens of a context and its continuation."""


@runtime_checkable
class Instance(Protocol):
    """Request (`lm_eval.api.instance.Instance`), whose arguments depend on its kind."""

    @property
    def args(self) -> tuple: ...


class HarnessModel(TemplateLM):
    """Language model of a run or of a hub folder, with the interface of the harness.

    A context is processed once for all continuations that are compared after it, and only its state
    is kept. Documents are processed as one stream of any length. Results equal those of the
    harness's own model of Hugging Face (`hf`): with a `max_length`, longer requests are cut on the
    left, and documents are processed in windows.

    Args:
      workdir: folder of a run or of a saved model; `pretrained` is an alias.
      batch_size: sequences per batch; `auto` is 16, or `max_batch_size` if that is smaller.
      max_gen_toks: maximum number of generated tokens, unless the task sets it.
      latest: whether to load the latest checkpoint instead of the best one.
      share: whether contexts are processed once; otherwise each continuation is processed together
        with its context, for comparison.
      max_length: maximum number of tokens of a context with its continuation; that of the model's
        position embeddings when None.
      add_bos_token: whether texts begin with the token for it; as the tokenizer does when None.
    """

    _max_length: int | None = None
    add_bos_token: bool | None = None

    def __init__(
        self,
        workdir: str | None = None,
        pretrained: str | None = None,
        batch_size: int | str = 16,
        max_gen_toks: int | str = 256,
        latest: bool = False,
        share: bool = True,
        max_length: int | None = None,
        add_bos_token: bool | None = None,
        max_batch_size: int | str | None = None,
        **unknown: JSON,
    ) -> None:
        super().__init__()
        self.folder = workdir or pretrained
        if self.folder is None:
            raise UserError(
                "model_args: workdir is missing; give workdir=FOLDER of a run or of a saved model"
            )
        given = {name for name, x in unknown.items() if x is not None}
        if strange := given - {"device"}:
            raise UserError(
                f"model_args {min(strange)}={unknown[min(strange)]!r}: unknown argument; choose "
                "from workdir, batch_size, max_gen_toks, latest, share, max_length, add_bos_token"
            )
        if max_length is not None and (not str(max_length).isdecimal() or int(max_length) < 2):
            raise UserError(f"model_args max_length={max_length}: must be an integer >= 2")
        self.batch_size = batch_size_of(batch_size, max_batch_size)
        self.max_gen_toks, self.share = int(max_gen_toks), share
        self._max_length = None if max_length is None else int(max_length)
        self.add_bos_token = add_bos_token
        self.model, self.encoding, self.step = load_text_run(self.folder, best=not latest)
        if not self.model.config.is_causal:
            raise UserError(
                f"{self.folder}: the model is not causal; choose a causal language model"
            )
        reach = self.model.config.max_length
        if reach is not None and self._max_length is not None and self._max_length > reach:
            raise UserError(
                f"model_args max_length={max_length}: the model has positions of {reach} tokens; "
                "choose at most these"
            )
        self.graph, self.parameters = nnx.split(self.model)

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens that are processed together; None: any number."""
        reach = self.model.config.max_length
        return reach if self._max_length is None else self._max_length

    @property
    def eot_token_id(self) -> int:
        return self.encoding.end_of_text_id

    @property
    def prefix_token_id(self) -> int:
        """The token before empty contexts and documents: that for the beginning of texts, if the
        tokenizer has one, or else the end-of-text token."""
        return next(iter(self._bos_ids()), self.eot_token_id)

    def _bos_ids(self) -> list[int]:
        """The token for the beginning of texts, also if the tokenizer does not add it."""
        tokenizer = self.encoding
        if not isinstance(tokenizer, PretrainedTokenizer):
            return []
        bos = tokenizer.special_tokens.get("bos_token", "")
        return tokenizer.encode_with_special_tokens(bos) or [*tokenizer.start_ids]

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer and its chat templates, for the harness's cache of requests."""
        content = json.dumps([self.encoding.fingerprint, {**self._templates}])
        name = self.encoding.name.replace("/", "__")
        return f"{name}-{hashlib.sha256(content.encode()).hexdigest()[:8]}"

    def get_model_info(self) -> dict[str, int]:
        """Return the metadata that the harness writes with its results."""
        sizes = jax.tree.map(lambda x: x.size, self.parameters)
        return {"model_num_parameters": sum(jax.tree.leaves(sizes)), "model_step": self.step}

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The text of a conversation in the template of the tokenizer, for `--apply_chat_template`.
        Without a generation prompt, the last message is the beginning of an answer, and its turn is
        not ended.

        Raises:
          UserError: the tokenizer has no template, or the template refuses the conversation.
        """
        if DEFAULT not in self._templates:
            raise UserError(
                f"--apply_chat_template: the tokenizer of {self.folder} has no chat template; "
                "leave it out"
            )
        assert isinstance(self.encoding, PretrainedTokenizer)
        chat = [dict(message) for message in chat_history]
        others = [message for message in chat if message["role"] != "system"]
        if not add_generation_prompt:
            chat[-1]["content"] += CONTINUED
        render = partial(
            self.encoding.render_chat_template, add_generation_prompt=add_generation_prompt
        )
        try:
            text = render(chat)
        except UserError as error:
            if len(others) == len(chat):
                raise
            warnings.warn(f"{error}: the system message is left out", stacklevel=2)
            text = render(others)
        if add_generation_prompt:
            return text
        text, tag, rest = text.rpartition(CONTINUED.strip())
        if not tag:
            raise UserError(
                f"--apply_chat_template: the chat template of {self.folder} leaves out the "
                "beginning of an answer, which a task gives (gen_prefix); leave "
                "--apply_chat_template out"
            )
        return text if rest.startswith(" ") else text.rstrip()

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
        if add_special_tokens is None:
            add_special_tokens = self.add_bos_token
        start = [*start_ids(tokenizer)] if add_special_tokens in (None, True) else []
        if add_special_tokens and not start:
            start = self._bos_ids()
        return ids if ids[: len(start)] == start else [*start, *ids]

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log p, whether greedy decoding yields it) of continuations after contexts.

        Raises:
          UserError: a continuation has no token after its context.
        """
        del disable_tqdm
        texts: list[tuple[str, str]] = [request.args for request in requests]
        return self._loglikelihood_tokens([(pair, *self._encode_pair(*pair)) for pair in texts])

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Encode both, with white space at the end of the context as part of the continuation. The
        prefix token precedes a continuation without context."""
        if context:
            before, ids = super()._encode_pair(context, continuation)
        else:
            before, ids = [], self.tok_encode(continuation, add_special_tokens=False)
        if not before:
            ids = ids if ids[:1] == [self.prefix_token_id] else [self.prefix_token_id, *ids]
            before, ids = ids[:1], ids[1:]
        if not ids:
            raise UserError(
                f"the continuation {continuation!r} after the context {context[-40:]!r} has no "
                "token of its own; begin it with a space, or end the context with a complete word"
            )
        return before, ids

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **unused: JSON
    ) -> list[tuple[float, bool]]:
        """Return (log p, whether greedy decoding yields it) of continuations after contexts."""
        del unused
        within = self._within_max_length(requests)
        cut = [self._cut(context, continuation) for context, continuation in within]
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

    def _within_max_length(self, requests: Sequence[Request]) -> list[tuple[list[int], list[int]]]:
        """Cut contexts on the left where they exceed the maximum length with their
        continuations."""
        pairs = [(context, continuation) for _, context, continuation in requests]
        if (length := self.max_length) is None:
            return pairs
        longest = max((len(continuation) for _, continuation in pairs), default=0)
        if longest > length:
            raise UserError(
                f"{self.folder}: a continuation has {longest} tokens, more than the maximum length "
                f"{length}; shorten it"
            )
        excess = [max(0, len(a) + len(b) - length - 1) for a, b in pairs]
        self._warn_of_cut(excess, length)
        return [(a[more:], b) for (a, b), more in zip(pairs, excess, strict=True)]

    def _warn_of_cut(self, excess: Sequence[int], length: int) -> None:
        if count := sum(map(bool, excess)):
            warnings.warn(
                f"{self.folder}: {count} of {len(excess)} contexts are cut on the left, by up to "
                f"{max(excess)} tokens, to the maximum length of {length} tokens",
                stacklevel=3,
            )

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of documents, each after the prefix token."""
        del disable_tqdm
        texts = [self.tok_encode(request.args[0]) for request in requests]
        length = self.max_length
        found = self._streamed(texts) if length is None else self._windowed(texts, length)
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
        """Split tokens into windows of at most `length`, each after one token of context; the last
        one has more, since it is complete."""
        windows, of = [], []
        for number, text in enumerate(texts):
            for window in get_rolling_token_windows(text, self.prefix_token_id, length, 1):
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
        options = {
            group: generation_options(requests[numbers[0]].args[1], self.max_gen_toks, group[1])
            for group, numbers in alike.items()
        }
        tokenizer = self.encoding
        hidden = tokenizer.special_ids if isinstance(tokenizer, PretrainedTokenizer) else ()
        for group, numbers in alike.items():
            room = self._room(options[group]["max_new_tokens"])
            contexts = [self.tok_encode(requests[n].args[0]) for n in numbers]
            if room is not None:
                self._warn_of_cut([max(0, len(tokens) - room) for tokens in contexts], room)
                contexts = [tokens[-room:] for tokens in contexts]
            prompts = [tokens or [self.prefix_token_id] for tokens in contexts]
            for part in batches(self.batch_size, [*zip(numbers, prompts, strict=True)]):
                tokens = [tokens for _, tokens in part]
                texts = complete(self.model, self.encoding, tokens, hidden=hidden, **options[group])
                for (number, _), (text,) in zip(part, texts, strict=True):
                    found[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return found

    def _room(self, max_new_tokens: int) -> int | None:
        """Maximum number of tokens of contexts; None: any number."""
        if (length := self.max_length) is None:
            return None
        if max_new_tokens >= length:
            raise UserError(
                f"generation_kwargs.max_gen_toks={max_new_tokens}: must be less than the maximum "
                f"length {length} of {self.folder}; reduce it by model_args max_gen_toks or "
                "--gen_kwargs"
            )
        return length - max_new_tokens

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
