"""Layout of the arrays in a call of log-attention: `Inputs`, and `Averages` of a state."""

from typing import NamedTuple

import jax.numpy as jnp

from heinsen_jax.typing import Array, Bool, Float, pytree_dataclass


@pytree_dataclass
class Inputs:
    """Inputs with tokens on axis 1; R query heads share each of G key/value heads.

    Attributes:
      query: `[B, T, G, R, K]`.
      key: `[B, S, G, K]`, S = T if causal; -inf masks a token.
      value: `[B, S, G, V]`, values or log-values.
      log_decay: `[B, S, G, K]` or `[B, S, G, 1]`, None for no decay.
      starts: `[B, S]`, whether a token begins a segment.
    """

    query: Float[Array, "B T G R K"]
    key: Float[Array, "B S G K"]
    value: Float[Array, "B S G V"]
    log_decay: Float[Array, "B S G _"] | None = None
    starts: Bool[Array, "B S"] | None = None

    @property
    def length(self) -> int:
        return self.key.shape[1]

    @property
    def decay_and_starts(self) -> Float[Array, "B S G _"] | None:
        """`log_decay`, -inf where a segment starts; None without decay and segments."""
        if self.starts is None:
            return self.log_decay
        decay = jnp.zeros_like(self.key[..., :1]) if self.log_decay is None else self.log_decay
        return jnp.where(self.starts[..., None, None], -jnp.inf, decay)


class Averages(NamedTuple):
    """State as averages of values, or as their logarithms.

    Attributes:
      log_z: `[*B, K]`, log of the sum of exp(K_s) over tokens.
      mean: `[*B, K, V]`, the average of values under each key feature's softmax over tokens; 0 for
        no tokens, or -inf as a logarithm. Never larger than the largest value.
    """

    log_z: Float[Array, "*B K"]
    mean: Float[Array, "*B K V"]


Outputs = tuple[Float[Array, "B T G R V"], Float[Array, "B T G R"]]  # Y or log Y, and log Z


def pad_tokens(inputs: Inputs, length: int) -> Inputs:
    """Append masked tokens that extend no range of values."""
    missing = length - inputs.length
    if not missing:
        return inputs

    def widths(x: Array) -> list[tuple[int, int]]:
        return [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]

    decay, starts = inputs.log_decay, inputs.starts
    return Inputs(
        query=jnp.pad(inputs.query, widths(inputs.query)),
        key=jnp.pad(inputs.key, widths(inputs.key), constant_values=-jnp.inf),
        value=jnp.pad(inputs.value, widths(inputs.value), mode="edge"),
        log_decay=None if decay is None else jnp.pad(decay, widths(decay)),
        starts=None if starts is None else jnp.pad(starts, widths(starts)),
    )
