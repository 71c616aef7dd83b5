"""Generation of tokens: all in one compiled function, or one by one, without end."""

import sys
from collections.abc import Iterator
from functools import partial
from typing import Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.attention.cache import bucket
from heinsen_jax.errors import UserError
from heinsen_jax.generate import states
from heinsen_jax.generate.compiled import Logits, Structure, Weights, step
from heinsen_jax.generate.engine import Engine
from heinsen_jax.generate.prompts import Padding, PromptLengths, right_padded
from heinsen_jax.generate.sampling import Sampler
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.models.language_model import check_tokens
from heinsen_jax.typing import Array, ArrayLike, Integer, Shaped

Carry: TypeAlias = tuple[Integer[Array, "*B"], LanguageModelState]
"""The last sampled token of each row, and the state before it."""

MORE_TOKENS = 256  # minimum growth of a stream's capacity; at least as many as it has generated


@overload
def generate(
    model: LanguageModel | Engine,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Shaped[Array, "..."] | None = None,
    state: LanguageModelState | None = None,
    num_tokens: int | None = None,
    return_state: Literal[False] = False,
    lengths: PromptLengths | None = None,
    padding: Padding = "right",
) -> Integer[Array, "*B new"]: ...


@overload
def generate(
    model: LanguageModel | Engine,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Shaped[Array, "..."] | None = None,
    state: LanguageModelState | None = None,
    num_tokens: int | None = None,
    return_state: Literal[True],
    lengths: PromptLengths | None = None,
    padding: Padding = "right",
) -> tuple[Integer[Array, "*B new"], LanguageModelState]: ...


def generate(
    model: LanguageModel | Engine,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Shaped[Array, "..."] | None = None,
    state: LanguageModelState | None = None,
    num_tokens: int | None = None,
    return_state: bool = False,
    lengths: PromptLengths | None = None,
    padding: Padding = "right",
) -> Integer[Array, "*B new"] | tuple[Integer[Array, "*B new"], LanguageModelState]:
    """Continue each row of tokens.

    Logits are divided by the temperature and filtered by `top_k` and `top_p`, as by
    `filter_logits`; a token is sampled from the softmax of the remaining ones.

    Args:
      model: the model.
      tokens: the prompts `[*B, T]`, T >= 1.
      max_new_tokens: number of tokens to generate.
      temperature: > 0.
      top_k: number of candidates; all when None, greedy (no `key` needed) when 1.
      top_p: probability that the candidates have together, in (0, 1]; 1 when None.
      key: a `jax.random.key`, needed unless `top_k` is 1; or one per row, `[*B]`, so that rows are
        sampled as they would be alone.
      state: state before `tokens`; None at the start of a sequence.
      num_tokens: only ids below this are sampled; a model's vocabulary may be padded.
      return_state: whether to return the state, too. It is the state before the last new token:
        to continue, pass it with that token.
      lengths: lengths `[B]` of the prompts `[B, T]`, if some are shorter than T: they are continued
        as they would be alone. Padding may be any ids of the vocabulary.
      padding: side of the padding.

    Returns:
      The new tokens `[*B, max_new_tokens]`, of at least 32 bits, or the pair (tokens, state).

    Raises:
      UserError: an argument is out of its range, or the model has too few positions; the message
        names the argument.
      ValueError: tokens are not integers, or an id is not in the vocabulary.

    Examples:
      >>> from flax import nnx
      >>> from heinsen_jax.models import LanguageModel, LanguageModelConfig
      >>> sizes = {"vocab_size": 10, "model_dim": 8, "num_layers": 1, "num_heads": 2}
      >>> model = LanguageModel(LanguageModelConfig(**sizes), rngs=nnx.Rngs(0))
      >>> prompts = jnp.array([[3, 1, 4, 1], [2, 7, 0, 0]])
      >>> generate(model, prompts, 5, top_k=1, lengths=[4, 2]).shape
      (2, 5)
    """
    engine = Engine.of(model)
    sampler = Sampler.of(engine.config, temperature, top_k, key, num_tokens, top_p)
    tokens = _prompts(engine, tokens)
    if max_new_tokens < 0:
        raise UserError(f"max_new_tokens={max_new_tokens} must not be negative")
    if max_new_tokens == 0 and return_state:
        raise UserError(
            "max_new_tokens=0 with return_state=True: no token is processed; for the state of a "
            "prompt use model(tokens, return_state=True)"
        )
    if sampler.key.shape not in ((), tokens.shape[:-1]):
        raise UserError(
            f"key{[*sampler.key.shape]} must be one jax.random.key, or one for each row "
            f"{[*tokens.shape[:-1]]}"
        )
    if lengths is not None:
        tokens, lengths = right_padded(tokens, lengths, padding)
    if max_new_tokens == 0:
        return jnp.zeros((*tokens.shape[:-1], 0), tokens.dtype)
    fed = (tokens.shape[-1] if lengths is None else int(np.max(lengths))) + max_new_tokens - 1
    state = engine.init_state(tokens.shape[:-1]) if state is None else state
    engine.config.warn_beyond_trained_length(states.num_tokens(state) + fed)
    logits, state = engine.feed(tokens, engine.reserve(state, fed), lengths=lengths)
    carry: Carry = draw(sampler, logits, 0).astype(tokens.dtype), state
    new, further = carry[0][..., None], max_new_tokens - 1
    if further > 0:
        options = engine.structure, bucket(further), engine.weights, sampler
        carry, rest = further_tokens(*options, carry, 1, further)
        new = jnp.concatenate([new, rest[..., :further]], -1)
    return (new, carry[1]) if return_state else new


def stream(
    model: LanguageModel | Engine,
    tokens: ArrayLike,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Shaped[Array, "..."] | None = None,
    num_tokens: int | None = None,
) -> Iterator[int]:
    """Yield the tokens of `generate` for one prompt `[T]`, one at a time, without end.

    Raises:
      UserError: an argument is out of its range; or, later, the model has no further positions.
    """
    engine = Engine.of(model)
    sampler = Sampler.of(engine.config, temperature, top_k, key, num_tokens, top_p)
    if np.ndim(tokens) != 1 or sampler.key.shape:
        raise UserError("tokens and key: a stream is one sequence; give tokens [T] and one key")
    return (token for token, _ in continued(engine, _prompts(engine, tokens), sampler))


def continued(
    engine: Engine,
    tokens: Integer[Array | np.ndarray, "T"],
    sampler: Sampler,
    state: LanguageModelState | None = None,
    reserved: int = 0,
) -> Iterator[tuple[int, LanguageModelState]]:
    """Yield the tokens of `generate` for one prompt `[T]`, without end, each with the state before
    it. The given state has space for `reserved` tokens.

    Raises:
      UserError: the model has no further positions.
    """
    before = engine.init_state() if state is None else state
    free, needed, token = reserved, (length := tokens.shape[-1]), None
    left = engine.remaining(before)
    for position in range(sys.maxsize):
        if (left := left - needed) < 0:
            raise UserError("the sequence has reached model.max_length: generation ends here")
        if needed > free:  # rarely, since every new shape is compiled
            free = min(needed + MORE_TOKENS + position, left + needed)
            before = engine.reserve(before, free)
        free -= needed
        if token is None:
            logits, before = engine.feed(tokens, before)
        else:
            logits, before = step(engine.structure, engine.weights, token, before)
        token = draw(sampler, logits, position)
        engine.config.warn_beyond_trained_length(length + position)
        yield int(token), before
        needed = 1


def _prompts(engine: Engine, tokens: ArrayLike) -> Integer[Array, "*B T"]:
    """Prompts, in a dtype that has all ids of the vocabulary."""
    tokens = jnp.asarray(tokens)
    if tokens.ndim == 0 or tokens.shape[-1] == 0:
        raise UserError("the prompt has no tokens; give at least one, for example end of text")
    check_tokens(tokens, engine.config.vocab_size)
    return tokens if tokens.dtype.itemsize >= 4 else tokens.astype(jnp.int32)


@jax.jit
def draw(sampler: Sampler, logits: Logits, position: Integer[Array, ""]) -> Integer[Array, "*B"]:
    """Sample the token at a position after the prompt."""
    return sampler.draw(logits, sampler.keys(position))


@partial(jax.jit, static_argnums=(0, 1), donate_argnames="carry")
def further_tokens(
    structure: Structure,
    size: int,
    weights: Weights,
    sampler: Sampler,
    carry: Carry,
    position: Integer[Array, ""],
    count: Integer[Array, ""],
) -> tuple[Carry, Integer[Array, "*B size"]]:
    """Generate `count` further tokens, at most `size`, from a position on; also return the last
    token and the state before it."""

    def one(
        index: Integer[Array, ""], carry: tuple[Carry, Integer[Array, "*B size"]]
    ) -> tuple[Carry, Integer[Array, "*B size"]]:
        (token, state), new = carry
        logits, state = step(structure, weights, token, state)
        token = draw(sampler, logits, position + index).astype(token.dtype)
        return (token, state), new.at[..., index].set(token)

    token, _ = carry
    return lax.fori_loop(0, count, one, (carry, jnp.zeros((*token.shape, size), token.dtype)))
