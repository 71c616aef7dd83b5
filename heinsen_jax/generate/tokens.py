"""Generation of tokens: all in one compiled function, or one by one, without end."""

import sys
from collections.abc import Generator, Iterator
from functools import partial
from typing import Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.attention.cache import bucket
from heinsen_jax.errors import UserError
from heinsen_jax.generate.prompts import Padding, PromptLengths, padded, read, right_padded
from heinsen_jax.generate.sampling import Sampler, check_prompts
from heinsen_jax.generate.states import (
    has_independent_rows,
    loop_with_state,
    make_advance,
    smallest_capacity,
    to_rows,
)
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.typing import Array, ArrayLike, DTypeLike, Features, Integer, Key, Shaped

Carry: TypeAlias = tuple[Integer[Array, "*B"], LanguageModelState]
Drawn: TypeAlias = tuple[Integer[Array, "*B"], Integer[Array, "*B size"]]

MORE_TOKENS = 256  # minimum growth of a stream's capacity; at least as many as it has generated


@overload
def generate(
    model: LanguageModel,
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
    model: LanguageModel,
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
    model: LanguageModel,
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
      key: a `jax.random.key`; or one per row, `[*B]`, so that rows are sampled as they would be
        alone.
      state: state before `tokens`; None at the start of a sequence.
      num_tokens: only ids below this are sampled; a model's vocabulary may be padded.
      return_state: whether to return the state, too. It is the state before the last new token:
        to continue, pass it with that token.
      lengths: lengths `[B]` of the prompts `[B, T]`, if some are shorter than T: they are continued
        as they would be alone. Padding may be any tokens.
      padding: side of the padding.

    Returns:
      The new tokens `[*B, max_new_tokens]`, of at least 32 bits, or the pair (tokens, state).

    Raises:
      UserError: an argument is out of its range, or the model has too few positions; the message
        names the argument.
      ValueError: tokens are not integers, or an id is not in the vocabulary.
      NotImplementedError: `return_state` with `lengths`, for states that have one token count for
        all rows, such as caches.

    Examples:
      >>> from heinsen_jax.models import LanguageModel, LanguageModelConfig
      >>> sizes = {"vocab_size": 10, "model_dim": 8, "num_layers": 1, "num_heads": 2}
      >>> model = LanguageModel(LanguageModelConfig(**sizes), rngs=nnx.Rngs(0))
      >>> prompts = jnp.array([[3, 1, 4, 1], [2, 7, 0, 0]])
      >>> generate(model, prompts, 5, top_k=1, lengths=[4, 2]).shape
      (2, 5)
    """
    sampler = Sampler.of(model, temperature, top_k, key, num_tokens, top_p)
    tokens = _prompts(model, tokens)
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
    longest = tokens.shape[-1] if lengths is None else int(np.max(lengths))
    fed = longest + max(max_new_tokens - 1, 0)
    state = model.init_state(tokens.shape[:-1]) if state is None else state
    check_capacity(model, state, max_new_tokens, fed)
    state = model.ensure_capacity(state, fed)
    independent_rows = lengths is None or has_independent_rows(model, state)
    if lengths is not None:
        tokens, lengths = right_padded(tokens, lengths, padding)
        if not independent_rows and return_state:
            raise NotImplementedError(
                "return_state=True with lengths: states of "
                f"attention={model.config.layer_pattern} count the tokens of all rows together; "
                "continue each prompt by itself"
            )
        state = state if independent_rows else to_rows(model, state, len(tokens))
    limits = model.config.max_length, smallest_capacity(state)
    most = min((x for x in limits if x is not None), default=None)
    tokens, lengths = padded(tokens, lengths, max_length=most)
    if max_new_tokens == 0:
        return jnp.zeros((*tokens.shape[:-1], 0), tokens.dtype)
    options = *nnx.split(model), sampler, independent_rows
    carry: Carry = next_token(*options, tokens, lengths, state, 0)
    new, further = carry[0][..., None], max_new_tokens - 1
    if further > 0:
        carry, rest = further_tokens(*options, bucket(further), carry, 1, further)
        new = jnp.concatenate([new, rest[..., :further]], -1)
    return (new, carry[1]) if return_state else new


def check_capacity(model: LanguageModel, state: LanguageModelState, new: int, fed: int) -> None:
    """Raise UserError if the model has positions for fewer tokens than it will be fed; warn if it
    was trained on fewer."""
    model.config.warn_beyond_trained_length(fed)
    if fed > (left := model.remaining(state)):
        raise UserError(
            f"max_new_tokens={new}: processes {fed} more tokens, but the model has {left} "
            f"positions left (model.max_length={model.config.max_length}); request fewer, or give "
            "a shorter prompt"
        )


def stream(
    model: LanguageModel,
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
    sampler = Sampler.of(model, temperature, top_k, key, num_tokens, top_p)
    return _stream(model, _prompts(model, tokens), sampler)


def _prompts(model: LanguageModel, tokens: ArrayLike) -> Integer[Array, "*B T"]:
    """Prompts, checked, in a dtype that has all ids of the vocabulary."""
    tokens = jnp.asarray(tokens)
    check_prompts(model, tokens)
    return tokens if tokens.dtype.itemsize >= 4 else tokens.astype(jnp.int32)


def _stream(
    model: LanguageModel, prompt: Integer[Array, "T"], sampler: Sampler
) -> Generator[int, None, None]:
    options = *nnx.split(model), sampler, True
    state, free = model.init_state(()), 0
    left, needed = model.remaining(state), prompt.shape[-1]
    fed, length = padded(prompt, max_length=model.config.max_length)
    for position in range(sys.maxsize):
        if needed > free:  # rarely, since every new shape is compiled
            free = needed + MORE_TOKENS + position
            state = model.ensure_capacity(state, free)
        free -= needed
        if (left := left - needed) < 0:
            raise UserError("the sequence has reached model.max_length: generation ends here")
        token, state = next_token(*options, fed, length, state, position)
        model.config.warn_beyond_trained_length(prompt.shape[-1] + position)
        yield int(token)
        fed, length, needed = token[None], jnp.ones((), jnp.int32), 1


@partial(jax.jit, static_argnames=("graph", "independent_rows"))
def next_token(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    sampler: Sampler,
    independent_rows: bool,
    tokens: Integer[Array, "*B T"],
    lengths: Integer[Array, "*#B"],
    state: LanguageModelState,
    position: Integer[Array, ""],
) -> Carry:
    """Process padded prompts and sample the next token of each; also return the state before it."""
    advance = make_advance(graph, parameters, independent_rows)
    features, state = read(advance, tokens, lengths, state)
    keys = sampler.keys(position)
    return draw(graph, parameters, features, sampler, keys, tokens.dtype), state


def draw(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    features: Features,
    sampler: Sampler,
    keys: Key[Array, "*_"],
    dtype: DTypeLike,
) -> Integer[Array, "*B"]:
    """Sample the token after the last of features `[*B, T, D]`."""
    logits = nnx.merge(graph, parameters).readout(features[..., -1:, :])[..., 0, :]
    return sampler.draw(logits, keys).astype(dtype)


@partial(jax.jit, static_argnames=("graph", "independent_rows", "size"), donate_argnames="carry")
def further_tokens(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    sampler: Sampler,
    independent_rows: bool,
    size: int,
    carry: Carry,
    position: Integer[Array, ""],
    count: Integer[Array, ""],
) -> tuple[Carry, Integer[Array, "*B size"]]:
    """Generate `count` further tokens, at most `size`, from a position on; also return the last
    token and the state before it."""
    advance = make_advance(graph, parameters, independent_rows)
    token, state = carry

    def step(
        index: Integer[Array, ""], state: LanguageModelState, drawn: Drawn
    ) -> tuple[LanguageModelState, Drawn]:
        token, new = drawn
        features, state = advance(token[..., None], state)
        keys = sampler.keys(position + index)
        token = draw(graph, parameters, features, sampler, keys, token.dtype)
        return state, (token, new.at[..., index].set(token))

    new = jnp.zeros((*token.shape, size), token.dtype)
    state, (token, new) = loop_with_state(count, step, state, (token, new))
    return (token, state), new
