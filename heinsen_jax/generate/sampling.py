"""Sampling the next token from logits."""

from dataclasses import field

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.typing import Array, Float, Integer, Key, Shaped, pytree_dataclass


def filter_logits(
    logits: Float[Array, "*B V"],
    temperature: float | Float[Array, ""],
    top_k: int | None,
    top_p: float | Float[Array, ""] | None = None,
) -> Float[Array, "*B V"]:
    """Logits divided by the temperature. Those below the `top_k` largest become -inf; then those
    outside the nucleus, the smallest set of most probable tokens whose total probability is at
    least `top_p`. Tokens that tie with the last candidate are kept.

    References:
      Holtzman, Buys, Du, Forbes, Choi, 2020, The Curious Case of Neural Text Degeneration,
      arXiv:1904.09751, section 3.1.
    """
    undivided, logits = logits, logits / temperature
    if top_k is not None:  # of the undivided ones: quotients may be rounded to one number
        kth = lax.top_k(undivided, top_k)[0][..., -1:]
        logits = jnp.where(undivided < kth, -jnp.inf, logits)
    if top_p is not None:
        largest_first = jnp.sort(logits, -1, descending=True)
        p = jax.nn.softmax(largest_first, -1)
        # With top_p=1 all are candidates, although sums are rounded; the largest always is one,
        # also if top_p is rounded to 0.
        is_candidate = (jnp.cumsum(p, -1) - p < top_p) | (jnp.asarray(top_p) >= 1)
        last = jnp.min(largest_first, -1, keepdims=True, where=is_candidate, initial=jnp.inf)
        last = jnp.minimum(last, largest_first[..., :1])
        logits = jnp.where(logits < last, -jnp.inf, logits)
    return logits


@pytree_dataclass
class Sampler:
    """Parameters of sampling.

    Attributes:
      key: one random key for all rows, or one per row `[*B]`, which makes rows independent.
      temperature: divisor of the logits.
      top_k: number of candidates; all when None, greedy when 1.
      num_tokens: only ids below this are sampled.
      top_p: probability that the candidates have together; 1 when None.
    """

    key: Key[Array, "*B"]
    temperature: float | Float[Array, ""]
    top_k: int | None = field(metadata={"static": True})
    num_tokens: int = field(metadata={"static": True})
    top_p: float | Float[Array, ""] | None = None

    @classmethod
    def of(
        cls,
        config: LanguageModelConfig,
        temperature: float,
        top_k: int | None,
        key: Shaped[Array, "..."] | None,
        num_tokens: int | None,
        top_p: float | None = None,
    ) -> "Sampler":
        """Create the parameters, checked against the model's configuration.

        Raises:
          UserError: an argument is out of its range; the message names it.
        """
        vocab_size = config.vocab_size
        num_tokens = vocab_size if num_tokens is None else num_tokens
        if not 1 <= num_tokens <= vocab_size:
            raise UserError(f"num_tokens={num_tokens} must be in 1 .. {vocab_size}")
        if not temperature > 0:
            raise UserError(f"temperature={temperature} must be above 0; for greedy use top_k=1")
        if top_k is not None and not 1 <= top_k <= num_tokens:
            raise UserError(f"top_k={top_k} must be in 1 .. {num_tokens}, the number of tokens")
        if top_p is not None and not 0 < top_p <= 1:
            raise UserError(f"top_p={top_p} must be above 0 and at most 1")
        if key is None and top_k != 1:
            raise UserError("sampling needs key=jax.random.key(seed); only top_k=1 does without")
        drawn = jax.random.key(0) if key is None else key
        if not isinstance(drawn, jax.Array | np.ndarray):
            raise UserError(f"key={key!r} must be a jax.random.key, such as jax.random.key(0)")
        if not jnp.issubdtype(drawn.dtype, jax.dtypes.prng_key):
            drawn = jax.random.wrap_key_data(drawn)  # a key of jax.random.PRNGKey
        return cls(drawn, temperature, top_k, num_tokens, top_p)

    def keys(self, position: int | Integer[Array, ""]) -> Key[Array, "*B"]:
        """Random keys for the new token at a position."""
        fold_in = jax.random.fold_in
        for _ in self.key.shape:
            fold_in = jax.vmap(fold_in, (0, None))
        return fold_in(self.key, position)

    def draw(self, logits: Float[Array, "*B V"], keys: Key[Array, "*_"]) -> Integer[Array, "*B"]:
        """Sample a token for each row of logits, with one key for all rows or one per row."""
        logits = logits[..., : self.num_tokens]
        if self.top_k == 1:
            return jnp.argmax(logits, -1)
        largest = jnp.max(logits, -1, keepdims=True)  # so that quotients do not overflow
        temperature = jnp.maximum(self.temperature, jnp.finfo(logits.dtype).tiny)
        logits = filter_logits(logits - largest, temperature, self.top_k, self.top_p)
        choose = jax.random.categorical
        for _ in keys.shape:
            choose = jax.vmap(choose)
        return choose(keys, logits)
