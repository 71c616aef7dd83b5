"""Base class of softmax attention with optional rotary queries and keys, as layers."""

from typing import Annotated, Literal, TypeVar, Unpack

import jax
import jax.numpy as jnp
import numpy as np
import pydantic

from heinsen_jax.attention.heads import HeadsConfig
from heinsen_jax.attention.parameters import LayerOptions, linear
from heinsen_jax.attention.softmax_base import MaskedAttention, MaskedConfig, MaskKeywords
from heinsen_jax.ops.rotary import rotary
from heinsen_jax.ops.softmax import dot_product_attention
from heinsen_jax.typing import (
    Array,
    Features,
    Float,
    Integer,
    Keys,
    Mixed,
    Query,
    Values,
    config_dataclass,
)


@config_dataclass
class RotaryOptions(HeadsConfig):
    """Frequencies of rotary positions."""

    rotary_base: pydantic.PositiveFloat = 10000.0
    """Base of the frequencies of rotary positions: base^(-2i / P) for pair i of P features."""
    rotary_fraction: Annotated[float, pydantic.Field(gt=0, le=1)] = 1.0
    """Fraction of the features of a head that are rotated, the first ones."""
    rotary_factor: pydantic.PositiveFloat = 1.0
    """Factor by which frequencies are divided, for sequences longer than in training (linear
    scaling)."""
    rotary_original_length: pydantic.PositiveInt | None = None
    """Sequence length L of the original training: frequencies with at most `rotary_low_turns` turns
    in L tokens are divided by `rotary_factor`, those with at least `rotary_high_turns` are
    unchanged, and those between are interpolated."""
    rotary_low_turns: pydantic.PositiveFloat = 1.0
    """See `rotary_original_length`."""
    rotary_high_turns: pydantic.PositiveFloat = 4.0
    """See `rotary_original_length`."""
    rotary_interpolation: Literal["turns", "pairs"] = "turns"
    """Whether the interpolation is linear in the number of turns, as in Llama 3, or in the index of
    the pair, between whole pairs (Peng et al., 2023, YaRN, arXiv:2309.00071, equation 23). YaRN's
    factor of queries and keys is not included: its square is a factor of `scale`."""

    def __post_init__(self) -> None:
        if self.rotary_high_turns <= self.rotary_low_turns:
            raise ValueError(
                f"rotary_high_turns={self.rotary_high_turns} must be above "
                f"rotary_low_turns={self.rotary_low_turns}"
            )

    def rotated(self, key_depth: int) -> int:
        """Number of rotated features of a head.

        Raises:
          ValueError: it is odd or 0.
        """
        count = int(key_depth * self.rotary_fraction)
        if self.rotary_fraction < 1 and (count % 2 or not count):
            raise ValueError(
                f"rotary_fraction={self.rotary_fraction}: it selects {count} of {key_depth} "
                "features, but pairs are rotated; choose another fraction"
            )
        check_pairs(count)
        return count

    def frequencies(self, key_depth: int) -> np.ndarray | None:
        """Frequencies of the rotated pairs of features, in radians per token; None if they
        depend on `rotary_base` alone."""
        if self.rotary_fraction == self.rotary_factor == 1:
            return None
        rotated = self.rotated(key_depth)
        unscaled = self.rotary_base ** (-np.arange(0, rotated, 2) / rotated)
        scaled = unscaled / self.rotary_factor
        if self.rotary_original_length is not None:
            turns = self.rotary_original_length * unscaled / (2 * np.pi)
            low, high = self.rotary_low_turns, self.rotary_high_turns
            if self.rotary_interpolation == "pairs":
                pairs, size = np.arange(rotated // 2), rotated / 2 / np.log(self.rotary_base)
                first, last = (size * np.log(turns[0] / x) for x in (high, low))
                first, last = max(np.floor(first), 0), min(np.ceil(last), rotated - 1)
                unchanged = 1 - np.clip((pairs - first) / (last - first or 1e-3), 0, 1)
            else:
                unchanged = np.clip((turns - low) / (high - low), 0, 1)
            scaled = unchanged * unscaled + (1 - unchanged) * scaled
        return scaled

    def rotate(
        self, x: Float[Array, "*B T N K"], positions: Integer[Array, "T"] | Integer[Array, "*B T"]
    ) -> Float[Array, "*B T N K"]:
        """Queries or keys, rotated by their positions."""
        frequencies = self.frequencies(x.shape[-1])
        return rotary(x, positions, base=self.rotary_base, frequencies=frequencies)


@config_dataclass
class PositionsConfig(RotaryOptions, MaskedConfig):
    """Configuration of softmax attention with scaled dot products."""

    positions: Literal["none", "rotary", "alibi"] = "none"
    """Position encoding: none; rotary, which rotates queries and keys by angles proportional to
    their positions (RoPE), so that scores depend on distances; or alibi, which adds to the scores a
    bias proportional to the distance, by head, and is causal only."""
    scale: pydantic.PositiveFloat | None = None
    """Factor of the dot products; 1 / sqrt(key_depth) when None."""
    output_gate: Literal["head", "feature"] | None = None
    """Factor sigmoid(x Wg + b) of the outputs before the output projection, by head or by feature
    (Qiu et al., 2025, Gated Attention, arXiv:2505.06708); none when None."""


@config_dataclass
class RotaryConfig(PositionsConfig):
    """Configuration of softmax attention without ALiBi."""

    positions: Literal["none", "rotary"] = "none"
    """Position encoding: none; or rotary, which rotates queries and keys by angles proportional to
    their positions (RoPE), so that scores depend on distances."""


RotaryT = TypeVar("RotaryT", bound=PositionsConfig)


class RotaryAttention(MaskedAttention[RotaryT]):
    """Softmax attention with scaled dot products of optionally rotary queries and keys.

        y = (attend(q, k, v) * sigmoid(x Wg + b)) W3 + b3    with `output_gate`

    Raises:
      ValueError: rotary, and key_depth is odd.
    """

    Config = PositionsConfig

    def setup(self, **options: Unpack[LayerOptions]) -> None:
        super().setup(**options)
        if self.config.positions == "rotary":
            self.config.rotated(self.key_depth)
        if self.config.output_gate is not None:
            is_by_feature = self.config.output_gate == "feature"
            width = self.num_heads * (self.value_depth if is_by_feature else 1)
            axes, biased = ("embed", "heads"), self.config.use_bias
            self.output_gate = linear(self.model_dim, width, axes, use_bias=biased, **options)

    def between(
        self, query: Query, key: Keys, value: Values, **keywords: Unpack[MaskKeywords]
    ) -> Mixed:
        rule, scale = self.config.rule(keywords.get("is_causal", True)), self.config.scale
        return dot_product_attention(query, key, value, mask=rule, scale=scale, **keywords)

    def apply_output_gate(self, x: Features, y: Mixed) -> Mixed:
        if self.config.output_gate is None:
            return y
        gate = jax.nn.sigmoid(self.output_gate(x)).astype(y.dtype)
        width = self.value_depth if self.config.output_gate == "feature" else 1
        return y * gate.reshape(*y.shape[:-1], width)

    def with_positions(
        self, query: Query, key: Keys, before: int | Integer[Array, ""]
    ) -> tuple[Query, Keys]:
        if self.config.positions != "rotary":
            return query, key
        query, key = (
            self.config.rotate(x, before + jnp.arange(x.shape[-3], dtype=jnp.int32))
            for x in (query, key)
        )
        return query, key


def check_pairs(key_depth: int) -> None:
    """Raise ValueError unless the head dimension is even."""
    if key_depth % 2:
        raise ValueError(
            f"key_depth={key_depth}: rotary position encodings rotate pairs of features; make it "
            "even"
        )
