"""Options of the adapter to the lm-evaluation-harness: `generation_kwargs` of tasks, and sizes."""

import re
from collections.abc import Mapping
from typing import Any, Required, TypedDict, TypeVar, cast

import jax
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs

from heinsen_jax.errors import UserError
from heinsen_jax.typing import Array, Key

ALIASES = "max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens"
NEUTRAL: Mapping[str, Any] = {"num_beams": 1, "num_return_sequences": 1, "repetition_penalty": 1}
"""Options that are supported only with the value that has no effect."""
CHOICES = ("until", *ALIASES, "do_sample", "temperature", "top_k", "top_p", "seed")

Number = TypeVar("Number", int, float)


class CompleteKeywords(TypedDict, total=False):
    """Keyword arguments of `complete`."""

    stop: Required[list[str]]
    max_new_tokens: Required[int]
    top_k: int | None
    top_p: float | None
    temperature: float
    key: Key[Array, ""]


def generation_options(
    given: Mapping[str, Any],
    repetition: int,
    *,
    max_new_tokens: int,
    max_length: int | None,
    end_of_text: str,
) -> CompleteKeywords:
    """Return the keyword arguments of `complete` for a task's `generation_kwargs`.

    Args:
      given: the task's settings, with the names and aliases of the harness.
      repetition: number of equal requests before this one; they draw different samples.
      max_new_tokens: maximum number of tokens, unless the task sets it.
      max_length: maximum number of tokens of prompt and text; None if any.
      end_of_text: text of the end-of-text token, which ends a text, too.

    Raises:
      UserError: a setting is unknown or out of its range.
    """
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        if name in NEUTRAL and value != NEUTRAL[name]:
            raise _error(name, value, f"unsupported; set it to {NEUTRAL[name]}")
        if name not in NEUTRAL and name not in CHOICES:
            raise _error(name, value, f"unknown argument; choose from {', '.join(CHOICES)}")
    until = given.get("until", [])
    until = [until] if isinstance(until, str) else until
    if not isinstance(until, list) or not all(isinstance(x, str) and x for x in until):
        raise _error("until", until, "must be a text or a list of texts that are not empty")
    for name in ALIASES:
        if name in given and not re.fullmatch("[1-9][0-9]*", str(given[name])):
            raise _error(name, given[name], "must be an integer >= 1")
    temperature = _number("temperature", given.get("temperature", 1.0), float)
    seed = _number("seed", given.get("seed", 0), int)
    own = {name: value for name, value in given.items() if name not in NEUTRAL}
    settings = cast("dict[str, Any]", normalize_gen_kwargs({**own, "until": until}, max_new_tokens))
    limit = settings["max_gen_toks"]
    if max_length is not None and limit >= max_length:
        raise _error(
            "max_gen_toks", limit, f"must be less than max_length={max_length}; set a smaller one"
        )
    stop = handle_stop_sequences([*until], eos=end_of_text or None)
    options: CompleteKeywords = {"stop": stop, "max_new_tokens": limit}
    if not settings["do_sample"] or temperature == 0:
        return {**options, "top_k": 1}
    key = jax.random.fold_in(jax.random.key(seed), repetition)
    filters: CompleteKeywords = {**options, "key": key, "temperature": temperature}
    return {**filters, "top_k": given.get("top_k") or None, "top_p": given.get("top_p")}


def positive_or_auto(value: int | str, name: str, default: int | None = None) -> int:
    """Return an integer >= 1; the default for `auto` and `auto:N`, if given.

    Raises:
      UserError: the value is neither.
    """
    if default is not None and re.fullmatch(r"auto(:\d+(\.\d+)?)?", str(value)):
        return default
    if not re.fullmatch("0*[1-9][0-9]*", str(value)):
        choices = "an integer >= 1" + (", auto or auto:N" if default is not None else "")
        raise UserError(f"{name}={value}: must be {choices}")
    return int(value)


def _number(name: str, value: Any, kind: type[Number]) -> Number:
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise _error(name, value, "must be a number") from None


def _error(name: str, value: object, problem: str) -> UserError:
    return UserError(f"generation_kwargs.{name}={value!r}: {problem}")
