"""Sampling over explicit state, at constant cost per token; and its command line.

python -m heinsen_jax.generate --workdir runs/quickstart --prompt "def main("
"""

import codecs
import sys
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import tiktoken
import tyro
from flax import nnx
from jax import lax

from heinsen_jax.data import end_of_text_id
from heinsen_jax.errors import UserError, command_line
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.models.language_model import check_tokens
from heinsen_jax.training.checkpoint import load_run
from heinsen_jax.typing import Array

MORE_TOKENS = 256  # that a stream makes room for, and at least as many as it has made


def generate(
    model: LanguageModel,
    tokens: Array,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    key: Array | None = None,
    state: LanguageModelState | None = None,
    num_tokens: int | None = None,
    return_state: bool = False,
) -> Any:
    """Continues each row of tokens.

    Logits are divided by the temperature; then all below the k-th largest are dropped (ties with it
    stay); then a token is drawn by softmax.

    Args:
      model: the model.
      tokens: the prompts `[*B, T]`, T >= 1.
      max_new_tokens: how many to generate.
      temperature: > 0.
      top_k: how many candidates; all when None, greedy (no `key` needed) when 1.
      key: a `jax.random.key`.
      state: what came before `tokens`; None at the start of a text.
      num_tokens: only ids below this are drawn; a model's vocabulary may be padded.
      return_state: whether to return also the state, which has seen all but the last new token:
        to go on, pass it with that token.

    Returns:
      The new tokens `[*B, max_new_tokens]`, or a pair of them and the state.

    Raises:
      ValueError: an argument is out of its range; the message names it.
    """
    tokens = jnp.asarray(tokens)
    num_tokens = _check(model, tokens, temperature, top_k, key, num_tokens)
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens={max_new_tokens} must not be negative")
    graph, parameters = nnx.split(model)
    fed = tokens.shape[-1] + max(max_new_tokens - 1, 0)
    state = model.init_state(tokens.shape[:-1]) if state is None else state
    if fed > (left := model.remaining(state)):
        raise UserError(
            f"max_new_tokens={max_new_tokens}: the model has positions for {left} more "
            f"tokens, and {fed} would be fed to it"
        )
    state = model.with_room(state, fed)
    if max_new_tokens == 0:
        new = jnp.zeros((*tokens.shape[:-1], 0), tokens.dtype)
    else:
        key = jax.random.key(0) if key is None else key
        new, state = _generate(
            graph, parameters, tokens, state, key, temperature, top_k, num_tokens, max_new_tokens
        )
    return (new, state) if return_state else new


def stream(
    model: LanguageModel,
    tokens: Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    key: Array | None = None,
    num_tokens: int | None = None,
) -> Iterator[int]:
    """`generate` for one prompt `[T]`, without end, a token at a time. The same tokens."""
    tokens = jnp.asarray(tokens)
    num_tokens = _check(model, tokens, temperature, top_k, key, num_tokens)
    graph, parameters = nnx.split(model)
    key = jax.random.key(0) if key is None else key
    state, room = model.init_state(()), 0
    left = model.remaining(state)
    for position in range(sys.maxsize):
        if (needed := tokens.shape[-1]) > room:  # seldom: each other shape is compiled anew
            room = needed + MORE_TOKENS + position
            state = model.with_room(state, room)
        room -= needed
        if (left := left - needed) < 0:
            raise UserError(
                "the text is as long as the model has positions for, model.max_length: it ends here"
            )
        token, state = _next_token(
            graph, parameters, tokens, state, key, position, temperature, top_k, num_tokens
        )
        yield int(token)
        tokens = token[None]


def filter_logits(logits: Array, temperature: float | Array, top_k: int | None) -> Array:
    """logits / temperature, with -inf for all strictly below the k-th largest."""
    logits = logits / temperature
    if top_k is None:
        return logits
    kth = lax.top_k(logits, top_k)[0][..., -1:]
    return jnp.where(logits < kth, -jnp.inf, logits)


def _sample(logits, key, position, temperature, top_k, num_tokens) -> Array:
    logits = logits[..., :num_tokens]
    if top_k == 1:
        return jnp.argmax(logits, -1)
    logits = filter_logits(logits, temperature, top_k)
    return jax.random.categorical(jax.random.fold_in(key, position), logits)


@partial(jax.jit, static_argnames=("graph", "top_k", "num_tokens"))
def _next_token(
    graph, parameters, tokens, state, key, position, temperature, top_k, num_tokens
) -> tuple[Array, LanguageModelState]:
    """Feeds tokens [*B, T] and draws the one that follows."""
    model = nnx.merge(graph, parameters)
    features, state = model.features(tokens, state=state, return_state=True)
    logits = model.readout(features[..., -1:, :])[..., 0, :]
    token = _sample(logits, key, position, temperature, top_k, num_tokens)
    return token.astype(tokens.dtype), state


@partial(jax.jit, static_argnames=("graph", "top_k", "num_tokens", "max_new_tokens"))
def _generate(
    graph, parameters, tokens, state, key, temperature, top_k, num_tokens, max_new_tokens
) -> tuple[Array, LanguageModelState]:
    def step(carry: tuple[Array, Any], position: Array) -> tuple[tuple[Array, Any], Array]:
        token, state = carry
        token, state = _next_token(
            graph,
            parameters,
            token[..., None],
            state,
            key,
            position,
            temperature,
            top_k,
            num_tokens,
        )
        return (token, state), token

    first = _next_token(graph, parameters, tokens, state, key, 0, temperature, top_k, num_tokens)
    (_, state), rest = lax.scan(step, first, jnp.arange(1, max_new_tokens))
    return jnp.concatenate([first[0][..., None], jnp.moveaxis(rest, 0, -1)], -1), state


def _check(
    model: LanguageModel,
    tokens: Array,
    temperature: float,
    top_k: int | None,
    key: Array | None,
    num_tokens: int | None,
) -> int:
    if not model.config.is_causal:
        raise UserError("the model is not causal: it fills in masked tokens, and cannot write")
    vocab_size = model.config.vocab_size
    num_tokens = vocab_size if num_tokens is None else num_tokens
    if tokens.ndim == 0 or tokens.shape[-1] == 0:
        raise UserError("the prompt has no tokens: give at least one, for example end of text")
    check_tokens(tokens, vocab_size)
    if not 1 <= num_tokens <= vocab_size:
        raise UserError(f"num_tokens={num_tokens} must be in 1 .. {vocab_size}")
    if not temperature > 0:
        raise UserError(f"temperature={temperature} must be above 0; for greedy use top_k=1")
    if top_k is not None and not 1 <= top_k <= num_tokens:
        raise UserError(f"top_k={top_k} must be in 1 .. {num_tokens}, the number of tokens")
    if key is None and top_k != 1:
        raise UserError("sampling needs key=jax.random.key(seed); only top_k=1 does without")
    return num_tokens


def decode_stream(tokenizer: tiktoken.Encoding, tokens: Iterator[int]) -> Iterator[str]:
    """Text as it comes: a character is yielded once its last byte is there."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in tokens:
        yield decoder.decode(tokenizer.decode_single_token_bytes(token))
    yield decoder.decode(b"", final=True)


@command_line
def main() -> None:
    def run(
        workdir: str,
        prompt: str,
        max_new_tokens: int = 256,
        temperature: Annotated[float, tyro.conf.arg(help="above 0; lower is safer")] = 0.8,
        top_k: Annotated[int | None, tyro.conf.arg(help="candidates; 1 is greedy")] = None,
        seed: int = 0,
        latest: Annotated[bool, tyro.conf.arg(help="the latest checkpoint, not the best")] = False,
    ) -> None:
        """Continues a prompt with a trained model, streaming text as it is sampled."""
        if max_new_tokens < 1:
            raise UserError(f"--max-new-tokens {max_new_tokens} must be at least 1")
        model, tokenizer, _ = load_run(workdir, best=not latest)
        if tokenizer is None:
            raise UserError(f"{workdir} holds a run that learned a task: there is no text to write")
        tokens = tokenizer.encode_ordinary(prompt)
        if not tokens:
            raise UserError("--prompt is empty: give at least one character")
        sampled = stream(
            model,
            jnp.asarray(tokens, jnp.int32),
            temperature=temperature,
            top_k=top_k,
            key=jax.random.key(seed),
            num_tokens=tokenizer.n_vocab,
        )
        print(prompt, end="", flush=True)
        for text in decode_stream(tokenizer, _until_end(sampled, tokenizer, max_new_tokens)):
            print(text, end="", flush=True)
        print()

    tyro.cli(run)


def _until_end(tokens: Iterator[int], tokenizer: tiktoken.Encoding, most: int) -> Iterator[int]:
    end = end_of_text_id(tokenizer)
    for _, token in zip(range(most), tokens, strict=False):
        if token == end:
            return
        yield token


if __name__ == "__main__":
    raise SystemExit(main())
