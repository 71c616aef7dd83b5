"""Generation of text: many prompts in a batch, several samples of each, stop strings."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from heinsen_jax.data import Tokenizer, start_ids, stop_ids
from heinsen_jax.errors import UserError
from heinsen_jax.generate.prompts import padded, read
from heinsen_jax.generate.sampling import Sampler, check_prompts
from heinsen_jax.generate.states import init_rows, make_advance, select_rows
from heinsen_jax.generate.tokens import Carry, check_capacity, draw, further_tokens, generate
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.typing import Array, Integer, Shaped

CHECK_EVERY = 32  # tokens that are sampled between two checks for stop strings


def complete(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    *,
    stop: Sequence[str] = (),
    num_samples: int = 1,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    key: Shaped[Array, "..."] | None = None,
    state: LanguageModelState | None = None,
) -> list[list[str]]:
    """Continue each prompt: `num_samples` texts each.

    Prompts of any lengths are processed once, in one batch, and their states are continued several
    times. A continuation does not depend on the other prompts: sample i uses the key
    `jax.random.fold_in(key, i)`.

    Args:
      model: the model.
      tokenizer: its tokenizer.
      prompts: texts of at least one token, or their tokens.
      max_new_tokens: maximum number of tokens; the end-of-text token, or another stop token of a
        pretrained model, ends a text earlier.
      stop: strings that end a text and are not part of it.
      num_samples: samples per prompt.
      temperature, top_k, top_p, key: as for `generate`.
      state: state of one sequence that precedes every prompt; None at the start.

    Raises:
      UserError: an argument is out of its range; the message names it.

    Examples:
      >>> from heinsen_jax.data import get_tokenizer
      >>> from heinsen_jax.models import LanguageModel, LanguageModelConfig
      >>> sizes = {"vocab_size": 257, "model_dim": 8, "num_layers": 1, "num_heads": 2}
      >>> model = LanguageModel(LanguageModelConfig(**sizes), rngs=nnx.Rngs(0))
      >>> tokenizer = get_tokenizer("bytes")
      >>> texts = complete(model, tokenizer, ["a", "bcd"], 4, top_k=1, num_samples=3)
      >>> [len(samples) for samples in texts]
      [3, 3]
    """
    sampler = Sampler.of(model, temperature, top_k, key, tokenizer.vocab_size, top_p)
    if sampler.key.shape:
        raise UserError("key must be one jax.random.key: samples fold their number into it")
    if isinstance(prompts, str) or isinstance(stop, str):
        raise UserError("prompts and stop must be lists of strings: wrap a single string in a list")
    if "" in stop:
        raise UserError("stop contains an empty string, which would stop every sample immediately")
    if num_samples < 1 or max_new_tokens < 0:
        raise UserError(
            f"num_samples={num_samples} must be at least 1, and max_new_tokens={max_new_tokens} at "
            "least 0"
        )
    if not prompts or max_new_tokens == 0:
        return [[""] * num_samples for _ in prompts]
    start = start_ids(tokenizer) if state is None else ()
    texts = [[*start, *_encoded(tokenizer, x)] if isinstance(x, str) else [*x] for x in prompts]
    lengths = np.array([len(text) for text in texts])
    tokens = np.zeros((len(texts), max(lengths)), np.int32)
    for row, text in zip(tokens, texts, strict=True):
        row[: len(text)] = text
    if not lengths.all():
        raise UserError(f"prompts[{int(np.argmin(lengths))}] is empty; give at least one character")
    check_prompts(model, jnp.asarray(tokens))

    first = model.init_state(()) if state is None else state
    check_capacity(model, first, max_new_tokens, tokens.shape[1] + max_new_tokens - 1)
    capacity = tokens.shape[1] + max_new_tokens + CHECK_EVERY
    state, independent_rows = init_rows(model, len(texts), capacity, state)
    keys = jax.vmap(partial(jax.random.fold_in, sampler.key))(jnp.arange(num_samples))
    of_rows = replace(sampler, key=jnp.tile(keys, len(texts)))
    writer = _Writer(model, tokenizer, stop, of_rows, independent_rows)
    fed, lengths = padded(
        jnp.asarray(tokens), jnp.asarray(lengths), max_length=model.config.max_length
    )
    written = writer.write(fed, lengths, state, max_new_tokens)
    return [written[i : i + num_samples] for i in range(0, len(written), num_samples)]


@dataclass(frozen=True)
class _Writer:
    """Continuation of rows by a few tokens at a time, until all have ended."""

    model: LanguageModel
    tokenizer: Tokenizer
    stop: Sequence[str]
    sampler: Sampler
    independent_rows: bool

    def write(
        self,
        tokens: Integer[Array, "B T"],
        lengths: Integer[Array, "B"],
        state: LanguageModelState,
        max_new_tokens: int,
    ) -> list[str]:
        options = *nnx.split(self.model), self.sampler, self.independent_rows
        samples = len(self.sampler.key) // len(tokens)
        carry = _begin(*options, samples, tokens, lengths, state)
        rows = np.asarray(carry[0])[:, None]
        for position in range(1, max_new_tokens, CHECK_EVERY):
            if all(self.ended(row)[1] for row in rows):
                break
            carry, new = further_tokens(*options, CHECK_EVERY, carry, position, CHECK_EVERY)
            rows = np.concatenate([rows, np.asarray(new)], 1)
        return [self.ended(row[:max_new_tokens])[0] for row in rows]

    def ended(self, row: np.ndarray) -> tuple[str, bool]:
        """The text of new tokens, and whether it has ended."""
        ends = np.flatnonzero(np.isin(row, stop_ids(self.tokenizer)))
        row = row[: ends[0]] if len(ends) else row
        text = b"".join(self.tokenizer.token_bytes(int(token)) for token in row)
        text = text.decode("utf-8", "replace")
        places = [place for place in (text.find(each) for each in self.stop) if place >= 0]
        return text[: min(places, default=len(text))], bool(places or len(ends))


@partial(jax.jit, static_argnames=("graph", "independent_rows", "samples"))
def _begin(
    graph: nnx.GraphDef[LanguageModel],
    parameters: nnx.State,
    sampler: Sampler,
    independent_rows: bool,
    samples: int,
    tokens: Integer[Array, "B T"],
    lengths: Integer[Array, "B"],
    state: LanguageModelState,
) -> Carry:
    """The first token of every sample, and the state before it."""
    features, state = read(
        make_advance(graph, parameters, independent_rows), tokens, lengths, state
    )
    each = jnp.repeat(jnp.arange(len(tokens)), samples)
    first = draw(graph, parameters, features[each], sampler, sampler.keys(0), tokens.dtype)
    return first, select_rows(state, each)


def sample(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompt: str,
    max_new_tokens: int,
    *,
    temperature: float = 0.8,
    seed: int = 0,
) -> str:
    """Return the prompt with one continuation, up to the end-of-text token or another stop token.

    Args:
      model: a causal model.
      tokenizer: the one it was trained with.
      prompt: at least one character.
      max_new_tokens: maximum number of tokens of the continuation.
      temperature: as for `generate`.
      seed: random seed.
    """
    tokens = _encoded(tokenizer, prompt)
    new = generate(
        model,
        jnp.asarray([*start_ids(tokenizer), *tokens], jnp.int32),
        max_new_tokens,
        temperature=temperature,
        key=jax.random.key(seed),
        num_tokens=tokenizer.vocab_size,
    ).tolist()
    return tokenizer.decode([*tokens, *until_end(iter(new), tokenizer, max_new_tokens)])


def check_text(text: str, name: str) -> None:
    """Raise UserError if a text has surrogates, which stand for bytes that are not UTF-8."""
    for place, letter in enumerate(text):
        if "\ud800" <= letter <= "\udfff":
            byte = ord(letter) - 0xDC00
            what = f"byte {byte:#04x}" if 0x80 <= byte <= 0xFF else f"surrogate {letter!a}"
            raise UserError(f"{name}: {what} at character {place + 1} is not UTF-8; leave it out")


def _encoded(tokenizer: Tokenizer, prompt: str) -> list[int]:
    check_text(prompt, "prompt")
    return [*tokenizer.encode(prompt)]


def decode_stream(
    tokenizer: Tokenizer, tokens: Iterator[int], errors: str = "replace"
) -> Iterator[str]:
    """Decode a stream of tokens that continue a text: each character is yielded with its last
    byte. `errors` says how invalid bytes are decoded, as in `bytes.decode`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    for token in tokens:
        yield decoder.decode(tokenizer.token_bytes(token))
    yield decoder.decode(b"", final=True)


def until_end(tokens: Iterator[int], tokenizer: Tokenizer, max_new_tokens: int) -> Iterator[int]:
    """The tokens before the first one that ends generation."""
    ends = stop_ids(tokenizer)
    for _, token in zip(range(max_new_tokens), tokens, strict=False):
        if token in ends:
            return
        yield token
