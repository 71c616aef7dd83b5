"""Adapter of trained models to EleutherAI's lm-evaluation-harness, named `heinsen_jax`.

python -m heinsen_jax.evaluate --workdir runs/quickstart --tasks NAME ... [--include-path FOLDER]
python -m heinsen_jax.interop.harness --model heinsen_jax --model_args workdir=DIR --tasks NAME ...

The second is the harness's own command line, with this model registered; in Python, importing this
module registers it for `lm_eval.simple_evaluate(model="heinsen_jax", ...)`. Needs
`pip install 'heinsen_jax[harness]'`.
"""

import collections
import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import numpy as np

from heinsen_jax.attention.cache import bucket
from heinsen_jax.data import start_ids
from heinsen_jax.errors import UserError, command_line, explain, without_extra
from heinsen_jax.generate import complete
from heinsen_jax.generate.engine import Engine
from heinsen_jax.generate.states import select_rows
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.models.config import Dtype
from heinsen_jax.runs.load import Precision, load_text_run
from heinsen_jax.typing import JSON

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import register_model
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.result_schema import EvalResults
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

    from heinsen_jax.interop.harness_batches import (
        SMALLEST,
        batches,
        padded,
        padded_row,
        windows,
    )
    from heinsen_jax.interop.harness_options import generation_options, positive_or_auto
    from heinsen_jax.interop.harness_texts import HarnessTexts
except ImportError as missing:
    raise without_extra(missing, __name__) from missing

BATCH_SIZE = 16
CHUNK = 512  # tokens of a document per forward pass
GIVEN, WANTED = slice(None, -1), slice(1, None)
ARGUMENTS = "workdir, batch_size, max_gen_toks, max_length, add_bos_token, latest, "
ARGUMENTS += "dtype, param_dtype, share"
logger = logging.getLogger(__name__)

Request: TypeAlias = tuple[tuple[str, str] | None, list[int], list[int]]
"""Text and tokens of a context and its continuation."""


@runtime_checkable
class Instance(Protocol):
    """Request (`lm_eval.api.instance.Instance`), whose arguments depend on its kind."""

    @property
    def args(self) -> tuple: ...


class HarnessModel(HarnessTexts):
    """Language model of a run or of a hub folder, with the interface of the harness.

    Requests are encoded, and cut if they are too long, as the harness's own Hugging Face model does
    (`lm_eval.models.huggingface.HFLM`). A context is processed once for all continuations that are
    compared after it, and only its state is kept. Without a maximum length, documents are processed
    as one stream; otherwise in windows of `max_length` tokens.

    Args:
      workdir: folder of a run or of a saved model; `pretrained` is an alias.
      batch_size: sequences per batch; `auto` or `auto:N` is the default size, without measuring
        memory.
      max_gen_toks: maximum number of generated tokens, unless the task sets it.
      max_length: maximum number of tokens that a prediction attends to; longer requests are cut on
        the left. None: the number of learned positions, or else `model.trained_length`, if either
        is known.
      add_bos_token: whether texts begin with the tokenizer's start token; None: as the tokenizer
        does.
      latest: whether to load the latest checkpoint instead of the best one.
      dtype: dtype of activations in matrix products; as in training when None.
      param_dtype: dtype of parameters except for vectors; as saved when None.
      share: whether contexts are processed once; otherwise each continuation is processed together
        with its context, for comparison.
    """

    model: LanguageModel | Engine
    requested_length: int | None = None
    """`max_length`; a subclass need not set it."""

    def __init__(
        self,
        workdir: str | None = None,
        pretrained: str | None = None,
        batch_size: int | str = BATCH_SIZE,
        max_gen_toks: int | str = 256,
        max_length: int | str | None = None,
        add_bos_token: bool | None = None,
        latest: bool = False,
        dtype: Dtype | None = None,
        param_dtype: Dtype | None = None,
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
                f"from {ARGUMENTS}"
            )
        self.batch_size = positive_or_auto(batch_size, "batch_size", BATCH_SIZE)
        self.max_gen_toks, self.share = positive_or_auto(max_gen_toks, "max_gen_toks"), share
        self.requested_length = (
            None if max_length is None else positive_or_auto(max_length, "max_length")
        )
        try:
            precision = Precision(dtype=dtype, param_dtype=param_dtype)
        except ValueError as error:
            raise UserError(f"model_args {explain(error)}") from None
        model, self.encoding, self.step = load_text_run(
            self.folder, best=not latest, on_host=True, precision=precision
        )
        if not model.config.is_causal:
            raise UserError(
                f"{self.folder}: the model is not causal; choose a causal language model"
            )
        self.model = Engine(model, self.encoding)
        positions = self.engine.config.max_length
        if positions is not None and (self.requested_length or 0) > positions:
            raise UserError(
                f"model_args max_length={max_length}: the model has {positions} positions; choose "
                "at most as many"
            )
        if add_bos_token not in (None, False) and not (start_ids(self.encoding) or self._bos):
            raise UserError(
                f"model_args add_bos_token={add_bos_token}: the tokenizer of {self.folder} has no "
                "bos_token; leave it out"
            )
        self.add_bos_token = add_bos_token

    @cached_property
    def engine(self) -> Engine:
        """The model, ready to serve; a subclass may set `model` to a `LanguageModel`."""
        return Engine.of(self.model)

    @property
    def max_length(self) -> int | None:
        """Maximum number of tokens that a prediction attends to; None if any."""
        config = self.engine.config
        return self.requested_length or config.max_length or config.trained_length

    def get_model_info(self) -> dict[str, int]:
        """Return the metadata that the harness writes with its results."""
        number = sum(x.size for x in jax.tree.leaves(self.engine.weights))
        return {"model_num_parameters": number, "model_step": self.step}

    def loglikelihood(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return (log p, whether greedy decoding yields it) of continuations after contexts."""
        del disable_tqdm
        pairs = [request.args for request in requests]
        return self._loglikelihood_tokens([(pair, *self._encode_pair(*pair)) for pair in pairs])

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], **unused: JSON
    ) -> list[tuple[float, bool]]:
        """Return (log p, whether greedy decoding yields it) of continuations after contexts."""
        del unused
        parts: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, (_, context, continuation) in enumerate(requests):
            some = windows(context, continuation, self.max_length)
            parts += some
            owners += [number] * len(some)
        sizes = [len(context) + len(continuation) for _, context, continuation in requests]
        self._warn_cut(sum(size - 1 > (self.max_length or size) for size in sizes))
        results = [(0.0, True)] * len(requests)
        for number, (value, is_likeliest) in zip(owners, self._score(parts), strict=True):
            total, all_likeliest = results[number]
            results[number] = total + value, all_likeliest and is_likeliest
        for (texts, *_), result in zip(requests, results, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return results

    def _warn_cut(self, number: int) -> None:
        if number:
            logger.warning(
                "%d requests are longer than max_length=%s; they were cut on the left, and lost "
                "the beginning of their contexts",
                number,
                self.max_length,
            )

    def _score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return (log p, whether likeliest) of tokens after others, which fit in `max_length`."""
        cut = [self._cut(*pair) for pair in pairs]
        results = [(0.0, False)] * len(pairs)
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
                    counted = slice(end - len(pairs[number][1]), end)
                    value = float(np.sum(log_p[row, counted], dtype=np.float64))
                    results[number] = value, bool(np.all(is_likeliest[row, counted]))
        return results

    def _cut(
        self, context: list[int], continuation: list[int]
    ) -> tuple[tuple[int, ...], list[int]]:
        """Split requests into shared prefixes and the remaining tokens. Nothing is shared if
        padding could exceed the model's positions."""
        if not self.share or self.engine.config.max_length is not None:
            return (), context + continuation
        return tuple(context[:-1]), context[-1:] + continuation

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return log p of documents, each after the prefix token."""
        del disable_tqdm
        texts = [self.tok_encode(request.args[0]) for request in requests]
        longest, limit = max(map(len, texts), default=0), self.max_length
        is_stream = self.engine.config.max_length is None and (limit is None or longest <= limit)
        values = self._streamed(texts) if is_stream else self._windowed(texts)
        for request, value in zip(requests, values, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, value)
        return values

    def _streamed(self, texts: list[list[int]]) -> list[float]:
        values = np.zeros(len(texts))
        order = sorted(range(len(texts)), key=lambda number: -len(texts[number]))
        for part in batches(self.batch_size, order):
            longest = len(texts[part[0]])
            chunk = min(CHUNK, bucket(longest, SMALLEST))
            state = self.engine.init_state((self.batch_size,))
            state = self.engine.reserve(state, -(-longest // chunk) * chunk)
            for start in range(0, longest, chunk):
                here = slice(start, start + chunk)
                given = [([self.prefix_token_id, *texts[number]])[here] for number in part]
                wanted = [texts[number][here] for number in part]
                given = [row[: len(other)] for row, other in zip(given, wanted, strict=True)]
                log_p, _, state = self._predict(given, wanted, state, chunk)
                for row, number in enumerate(part):
                    values[number] += np.sum(log_p[row, : len(wanted[row])], dtype=np.float64)
        return values.tolist()

    def _windowed(self, texts: list[list[int]]) -> list[float]:
        """Split tokens into windows of `max_length`: each token is predicted once, after the tokens
        before it in its window."""
        assert self.max_length is not None
        parts, owners = [], []
        for number, text in enumerate(texts):
            for window in get_rolling_token_windows(text, self.prefix_token_id, self.max_length, 1):
                parts.append((None, *make_disjoint_window(window)))
                owners.append(number)
        values = np.zeros(len(texts))
        for number, (log_p, _) in zip(owners, self._loglikelihood_tokens(parts), strict=True):
            values[number] += log_p
        return values.tolist()

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate text after contexts, greedily unless a task sets do_sample."""
        del disable_tqdm
        answers = [""] * len(requests)
        repetitions: collections.Counter[tuple[str, str]] = collections.Counter()
        alike: dict[tuple[str, int], list[int]] = {}
        for number, request in enumerate(requests):
            context, options = request.args[0], repr(sorted(request.args[1].items()))
            alike.setdefault((options, repetitions[context, options]), []).append(number)
            repetitions[context, options] += 1
        for (_, repetition), numbers in alike.items():
            options = generation_options(
                requests[numbers[0]].args[1],
                repetition,
                max_new_tokens=self.max_gen_toks,
                max_length=self.max_length,
                end_of_text=self.encoding.decode([self.eot_token_id]),
            )
            for part in batches(self.batch_size, numbers):
                contexts = self._prompts(
                    [requests[number].args[0] for number in part], options["max_new_tokens"]
                )
                given = self.engine, self.encoding, contexts
                texts = complete(*given, begins_text=True, skip_special_tokens=True, **options)
                for number, (text,) in zip(part, texts, strict=True):
                    answers[number] = text
                    self.cache_hook.add_partial("generate_until", requests[number].args, text)
        return answers

    def _prompts(self, contexts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
        """Encode contexts, cut on the left so that new tokens fit in `max_length`."""
        prompts = [self.tok_encode(context) or [self.prefix_token_id] for context in contexts]
        space = None if self.max_length is None else self.max_length - max_new_tokens
        if space is not None:
            self._warn_cut(sum(len(prompt) > space for prompt in prompts))
            prompts = [prompt[-space:] for prompt in prompts]
        return prompts

    def _states_after(self, contexts: list[list[int]], more: int) -> LanguageModelState:
        """Return the states after contexts, which may be empty, with capacity for more tokens."""
        tokens = padded(contexts, self.batch_size)[:, : self.engine.config.max_length]
        lengths = padded_row([len(context) for context in contexts], self.batch_size)
        state = self.engine.init_state((self.batch_size,))
        needed = tokens.shape[1] + bucket(more, SMALLEST)
        state = self.engine.reserve(state, int(min(needed, self.engine.remaining(state))))
        return self.engine.feed(tokens, state, lengths=lengths)[1]

    def _predict(
        self,
        given: list[list[int]],
        wanted: list[list[int]],
        state: LanguageModelState,
        length: int = SMALLEST,
    ) -> tuple[np.ndarray, np.ndarray, LanguageModelState]:
        """Return log p `[B, T]` of the tokens `wanted` after the given tokens and states, whether
        each has maximum probability, and the states after them."""
        max_length = self.engine.config.max_length
        arrays = (padded(x, self.batch_size, length) for x in (given, wanted))
        tokens, targets = (x[:, :max_length] for x in arrays)
        num_tokens = self.encoding.vocab_size
        log_p, is_likeliest, state = self.engine.score(
            tokens, targets, state, num_tokens=num_tokens
        )
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


@command_line
def main() -> None:
    cli_evaluate()


if __name__ == "__main__":
    raise SystemExit(main())
