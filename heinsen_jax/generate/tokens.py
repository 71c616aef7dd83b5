"""Generation of tokens: all in one compiled function, or one by one, without end."""

import sys
from collections.abc import Generator, Iterator
from functools import partial
from typing import Literal, TypeAlias, overload

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from heinsen_jax.errors import UserError
from heinsen_jax.generate.prompts import Padding, PromptLengths, read, right_padded
from heinsen_jax.generate.sampling import Sampler, check_prompts
from heinsen_jax.generate.states import Read, has_independent_rows, make_advance, to_rows
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.typing import Array, ArrayLike, DTypeLike, Features, Integer, Key, Shaped

Carry: TypeAlias = tuple[Integer[Array, "*B"], LanguageModelState]

MORE_TOKENS = 256  # minimum growth of a stream's capacity; at least as many as it has generated


@overload
def generate(
    model: LanguageModel,
    tokens: ArrayLike,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
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
    key: Shaped[Array, "..."] | None = None,
    state: LanguageModelState | None = None,
    num_tokens: int | None = None,
    return_state: bool = False,
    lengths: PromptLengths | None = None,
    padding: Padding = "right",
) -> Integer[Array, "*B new"] | tuple[Integer[Array, "*B new"], LanguageModelState]:
    """Continue each row of tokens.

    Logits are divided by the temperature. Those below the k-th largest are then masked (ties with
    it are kept), and a token is sampled from the softmax of the others.

    Args:
      model: the model.
      tokens: the prompts `[*B, T]`, T >= 1.
      max_new_tokens: number of tokens to generate.
      temperature: > 0.
      top_k: number of candidates; all when None, greedy (no `key` needed) when 1.
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
      The new tokens `[*B, max_new_tokens]`, or the pair (tokens, state).

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
    tokens = jnp.asarray(tokens)
    sampler = Sampler.of(model, temperature, top_k, key, num_tokens)
    check_prompts(model, tokens)
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
    graph, parameters = nnx.split(model)
    fed = tokens.shape[-1] + max(max_new_tokens - 1, 0)
    state = model.init_state(tokens.shape[:-1]) if state is None else state
    check_capacity(model, state, max_new_tokens, fed)
    state = model.ensure_capacity(state, fed)
    independent_rows = lengths is None or has_independent_rows(model, state)
    if not independent_rows:
        if return_state:
            raise NotImplementedError(
                f"return_state=True with lengths: states of attention={model.config.attention!r} "
                "count the tokens of all rows together; continue each prompt by itself"
            )
        state = to_rows(model, state, len(tokens))
    if max_new_tokens == 0:
        new, after = jnp.zeros((*tokens.shape[:-1], 0), tokens.dtype), state
    else:
        new, after = _generate(
            graph, parameters, tokens, lengths, state, sampler, max_new_tokens, independent_rows
        )
    return (new, after) if return_state else new


def check_capacity(model: LanguageModel, state: LanguageModelState, new: int, fed: int) -> None:
    """Raise UserError if the model has positions for fewer tokens than it will be fed."""
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
    key: Shaped[Array, "..."] | None = None,
    num_tokens: int | None = None,
) -> Iterator[int]:
    """Yield the tokens of `generate` for one prompt `[T]`, one at a time, without end.

    Raises:
      UserError: an argument is out of its range; or, later, the model has no further positions.
    """
    prompt = jnp.asarray(tokens)
    sampler = Sampler.of(model, temperature, top_k, key, num_tokens)
    check_prompts(model, prompt)
    return _stream(model, prompt, sampler)


def _stream(
    model: LanguageModel, fed: Integer[Array, "T"], sampler: Sampler
) -> Generator[int, None, None]:
    graph, parameters = nnx.split(model)
    state, free = model.init_state(()), 0
    left = model.remaining(state)
    for position in range(sys.maxsize):
        if (needed := fed.shape[-1]) > free:  # rarely, since every new shape is compiled
            free = needed + MORE_TOKENS + position
            state = model.ensure_capacity(state, free)
        free -= needed
        if (left := left - needed) < 0:
            raise UserError("the sequence has reached model.max_length: generation ends here")
        token, state = _next_token(graph, parameters, fed, state, sampler, position)
        yield int(token)
        fed = token[None]


@partial(jax.jit, static_argnames="graph")
def _next_token(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    tokens: Integer[Array, "*B T"],
    state: LanguageModelState,
    sampler: Sampler,
    position: Integer[Array, ""],
) -> Carry:
    """Feed tokens `[*B, T]` and sample the next one."""
    features, state = make_advance(graph, parameters, True)(tokens, state)
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


@partial(jax.jit, static_argnames=("graph", "max_new_tokens", "independent_rows"))
def _generate(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    tokens: Integer[Array, "*B T"],
    lengths: Integer[Array, "B"] | None,
    state: LanguageModelState,
    sampler: Sampler,
    max_new_tokens: int,
    independent_rows: bool,
) -> tuple[Integer[Array, "*B new"], LanguageModelState]:
    rows = make_advance(graph, parameters, independent_rows)
    if lengths is None:
        features, state = rows(tokens, state)
    else:
        features, state = read(rows, tokens, lengths, state)
    first = draw(graph, parameters, features, sampler, sampler.keys(0), tokens.dtype)
    draw_rest = partial(draw_further, graph, parameters, rows, sampler)
    (_, state), rest = draw_rest((first, state), jnp.arange(1, max_new_tokens))
    return jnp.concatenate([first[..., None], rest], -1), state


def draw_further(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    rows: Read,
    sampler: Sampler,
    carry: Carry,
    positions: Integer[Array, "new"],
) -> tuple[Carry, Integer[Array, "*B new"]]:
    """Generate further tokens `[*B, positions]`; also return (last token, state before it)."""

    def step(carry: Carry, keys: Key[Array, "*_"]) -> tuple[Carry, Integer[Array, "*B"]]:
        token, state = carry
        features, state = rows(token[..., None], state)
        token = draw(graph, parameters, features, sampler, keys, token.dtype)
        return (token, state), token

    carry, new = lax.scan(step, carry, jax.vmap(sampler.keys)(positions))
    return carry, jnp.moveaxis(new, 0, -1)
