"""Arguments of models and tasks of the lm-evaluation-harness, in the terms of this package."""

from collections.abc import Mapping
from typing import Any, Required, TypedDict

import jax
from lm_eval.models.utils import normalize_gen_kwargs

from heinsen_jax.errors import UserError
from heinsen_jax.typing import Array, Key

AUTO_BATCH_SIZE = 16
"""Sequences per batch with `batch_size=auto`, unless `max_batch_size` is smaller."""
SUPPORTED = (
    "until, max_gen_toks (or max_new_tokens, max_tokens, max_completion_tokens), do_sample, "
    "temperature, top_k, top_p, seed, num_beams=1"
)


class CompleteKeywords(TypedDict, total=False):
    """Keyword arguments of `complete`."""

    stop: Required[list[str]]
    max_new_tokens: Required[int]
    top_k: int | None
    top_p: float | None
    temperature: float
    key: Key[Array, ""]


def batch_size_of(given: int | str, maximum: int | str | None) -> int:
    """The number of sequences per batch; `auto` and `auto:N` are `AUTO_BATCH_SIZE`."""
    word, _, repeats = str(given).partition(":")
    if word == "auto" and (":" not in str(given) or repeats.isdecimal()):
        return min(
            AUTO_BATCH_SIZE, AUTO_BATCH_SIZE if maximum is None else batch_size_of(maximum, None)
        )
    if not str(given).isdecimal() or int(given) < 1:
        raise UserError(f"batch_size={given}: must be an integer >= 1, or auto")
    return int(given)


def generation_options(
    given: Mapping[str, Any], default_max_new_tokens: int, repetition: int
) -> CompleteKeywords:
    """The keyword arguments of `complete` for a task's `generation_kwargs`; repeated requests draw
    different samples.

    Raises:
      UserError: an argument is unknown or out of its range.
    """
    try:
        options: dict[str, Any] = {
            **normalize_gen_kwargs(
                {k: v for k, v in given.items() if v is not None}, default_max_new_tokens
            )
        }
        stop, max_new_tokens = options.pop("until"), options.pop("max_gen_toks")
        temperature = float(options.pop("temperature", 1.0))
        seed = int(options.pop("seed", 0))
    except (TypeError, ValueError) as error:
        raise UserError(f"generation_kwargs: {error}; correct {dict(given)}") from error
    is_random, top_k, top_p = (options.pop(x, None) for x in ("do_sample", "top_k", "top_p"))
    if options.get("num_beams") == 1:
        del options["num_beams"]
    if options:
        name = min(options)
        raise UserError(
            f"generation_kwargs.{name}={options[name]!r}: unsupported argument; choose from "
            f"{SUPPORTED}"
        )
    if not isinstance(is_random, bool):
        raise UserError(f"generation_kwargs.do_sample={is_random!r}: must be true or false")
    if not all(isinstance(text, str) and text for text in stop):
        raise UserError(f"generation_kwargs.until={stop!r}: must be texts of at least 1 character")
    if max_new_tokens < 0:
        raise UserError(f"generation_kwargs.max_gen_toks={max_new_tokens}: must be at least 0")
    fixed: CompleteKeywords = {"stop": stop, "max_new_tokens": max_new_tokens}
    if not is_random or temperature == 0:
        return {**fixed, "top_k": 1}
    key = jax.random.fold_in(jax.random.key(seed), repetition)
    return {**fixed, "key": key, "temperature": temperature, "top_k": top_k, "top_p": top_p}
