"""Generation of text: many prompts in a batch, several samples of each, stop strings."""

import codecs
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from heinsen_jax.data import Tokenizer, start_ids, stop_ids
from heinsen_jax.errors import UserError
from heinsen_jax.generate.engine import Engine
from heinsen_jax.generate.prompts import to_array
from heinsen_jax.generate.sampling import Sampler
from heinsen_jax.generate.states import check_one, num_tokens, select_rows
from heinsen_jax.generate.tokens import Carry, draw, further_tokens
from heinsen_jax.models import LanguageModel, LanguageModelState
from heinsen_jax.typing import Array, Shaped

CHECK_EVERY = 32  # tokens that are sampled between two checks for stop strings


def complete(
    model: LanguageModel | Engine,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int,
    *,
    stop: Sequence[str] = (),
    num_samples: int = 1,
    begins_text: bool = False,
    skip_special_tokens: bool = False,
    decoding_errors: str = "replace",
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
      begins_text: whether continuations are texts of their own, which do not begin with the space
        that a tokenizer of SentencePiece has before each word.
      skip_special_tokens: whether special tokens of a pretrained model are left out.
      decoding_errors: how invalid UTF-8 is decoded, as in `bytes.decode`.
      temperature, top_k, top_p, key: as for `generate`.
      state: state of one sequence that precedes every prompt; None at the start.

    Returns:
      For each prompt, its continuations, without the prompt.

    Raises:
      UserError: an argument is out of its range; the message names it.

    Examples:
      >>> from heinsen_jax.data import get_tokenizer
      >>> from flax import nnx
      >>> from heinsen_jax.models import LanguageModel, LanguageModelConfig
      >>> sizes = {"vocab_size": 257, "model_dim": 8, "num_layers": 1, "num_heads": 2}
      >>> model = LanguageModel(LanguageModelConfig(**sizes), rngs=nnx.Rngs(0))
      >>> tokenizer = get_tokenizer("bytes")
      >>> texts = complete(model, tokenizer, ["a", "bcd"], 4, top_k=1, num_samples=3)
      >>> [len(samples) for samples in texts]
      [3, 3]
    """
    engine = Engine.of(model)
    sampler = Sampler.of(engine.config, temperature, top_k, key, tokenizer.vocab_size, top_p)
    if sampler.key.shape:
        raise UserError("key must be one jax.random.key: samples fold their number into it")
    if isinstance(prompts, str) or isinstance(stop, str):
        raise UserError("prompts and stop must be lists of strings: wrap a single string in a list")
    if any(not isinstance(x, str) and np.ndim(x) == 0 for x in prompts):
        raise UserError("prompts must be texts or lists of ids: wrap the ids of one in a list")
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
    tokens, lengths = to_array(texts)
    if not lengths.all():
        raise UserError(f"prompts[{int(np.argmin(lengths))}] is empty; give at least one character")

    before = engine.init_state() if state is None else state
    check_one(engine, before)
    fed = tokens.shape[1] + max_new_tokens - 1
    engine.config.warn_beyond_trained_length(num_tokens(before) + fed)
    rows = engine.branch(engine.reserve(before, fed), len(texts))
    each = jnp.repeat(jnp.arange(len(texts)), num_samples)
    logits, after = select_rows(engine.feed(tokens, rows, lengths=lengths), each)
    keys = jax.vmap(partial(jax.random.fold_in, sampler.key))(jnp.arange(num_samples))
    sampler = replace(sampler, key=jnp.tile(keys, len(texts)))
    carry: Carry = draw(sampler, logits, 0), after
    rows = np.asarray(carry[0])[:, None]
    hidden = getattr(tokenizer, "special_ids", frozenset()) if skip_special_tokens else frozenset()
    until_stop = partial(_until_stop, tokenizer, stop, begins_text, hidden=hidden)
    for position in range(1, max_new_tokens, CHECK_EVERY):
        if all(until_stop("replace", row)[1] for row in rows):  # a last character may be incomplete
            break
        count = min(CHECK_EVERY, max_new_tokens - position)
        options = engine.structure, CHECK_EVERY, engine.weights, sampler
        carry, new = further_tokens(*options, carry, position, count)
        rows = np.concatenate([rows, np.asarray(new)[:, :count]], 1)
    written = [until_stop(decoding_errors, row)[0] for row in rows]
    return [written[i : i + num_samples] for i in range(0, len(written), num_samples)]


def _until_stop(
    tokenizer: Tokenizer,
    stop: Sequence[str],
    begins_text: bool,
    errors: str,
    row: np.ndarray,
    hidden: frozenset[int] = frozenset(),
) -> tuple[str, bool]:
    """The text of new tokens without those that are hidden, and whether it has ended."""
    ends = np.flatnonzero(np.isin(row, stop_ids(tokenizer)))
    row = row[: ends[0]] if len(ends) else row
    runs = [(x, [*ids]) for x, ids in itertools.groupby(row.tolist(), hidden.__contains__)]
    are_hidden = [is_hidden for is_hidden, _ in runs]
    parts = [b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors) for _, ids in runs]
    if begins_text and False in are_hidden:  # other tokenizers have no such space
        first = are_hidden.index(False)
        parts[first] = getattr(tokenizer, "without_first_space", str)(parts[first])
    text = "".join(parts)
    starts = [start for start in (text.find(each) for each in stop) if start >= 0]
    left, visible = min(starts, default=len(text)), ""
    for is_hidden, part in zip(are_hidden, parts, strict=True):
        visible += "" if is_hidden else part[:left]
        left = max(left - len(part), 0)
    return visible, bool(starts or len(ends))


def sample(
    model: LanguageModel | Engine,
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
    key = jax.random.key(seed)
    options = {"temperature": temperature, "key": key}
    ((text,),) = complete(model, tokenizer, [prompt], max_new_tokens, **options)
    return prompt + text


def check_text(text: str, name: str) -> None:
    """Raise UserError if a text has surrogates, which stand for bytes that are not UTF-8."""
    for position, letter in enumerate(text, start=1):
        if "\ud800" <= letter <= "\udfff":
            byte = ord(letter) - 0xDC00
            what = f"byte {byte:#04x}" if 0x80 <= byte <= 0xFF else f"surrogate {letter!a}"
            raise UserError(f"{name}: {what} at character {position} is not UTF-8; leave it out")


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
