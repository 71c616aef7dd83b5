"""The architecture of a language model."""

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

import pydantic

from heinsen_jax.attention import AttentionConfig, configure, mechanism
from heinsen_jax.attention.heads import head_depth
from heinsen_jax.attention.registry import FieldValue
from heinsen_jax.typing import config_dataclass

Positions = Literal["recurrence", "learned", "none"]


class BlockDefaults(NamedTuple):
    """What a block asks for where the configuration is silent.

    Attributes:
      options: of its mechanism, as far as that has such options.
      convolution_size: as the model's field.
      positions: as the model's field; those of the ends when None.
    """

    options: Mapping[str, FieldValue]
    convolution_size: int | None = None
    positions: Positions | None = None


FADING = {"gated": False, "values": "linear", "decay": "head", "rotary": True}
BLOCKS = {
    "paper": BlockDefaults({"gated": True}),
    "standard": BlockDefaults({"gated": False}),
    "fading": BlockDefaults(FADING, convolution_size=4, positions="none"),
    "fastformer": BlockDefaults({"gated": False}),
}


@config_dataclass
class LanguageModelConfig:
    """The architecture. The defaults are the paper's 125M model: 124,879,872 parameters."""

    vocab_size: pydantic.PositiveInt = 50304
    """Rows of the embedding; at least the tokenizer's vocabulary (gpt2: 50257)."""
    model_dim: pydantic.PositiveInt = 768
    """Width of the residual stream."""
    num_layers: pydantic.PositiveInt = 24
    """Residual blocks."""
    attention: str | tuple[str, ...] = "log"
    """The mechanism, by name; several take turns, layer by layer."""
    attention_options: tuple[tuple[str, int | float | bool | str], ...] = ()
    """Fields of mechanisms' configurations, as pairs of a name and a value: `log.window_size` is of
    all layers of that mechanism, `0.window_size` of the first in each turn."""
    block: Literal["paper", "standard", "fading", "fastformer"] = "paper"
    """The paper's: one residual branch, gated. Or the standard one: attention, then a perceptron,
    both pre-norm. Or that for log-attention which forgets, fading: the standard one with a
    convolution of 4 tokens at the start of each branch and no other positions, values of any sign,
    and decay by head; mechanisms that have an option `rotary` are rotary in it. Or Fastformer's:
    the standard one without biases in the perceptron, whose residual stream goes on from the
    normalised input of its attention."""
    mlp_ratio: pydantic.PositiveInt = 4
    """Width of the perceptron in the other blocks than the paper's, in widths of the model."""
    ends: Literal["paper", "fastformer"] = "paper"
    """What comes before the blocks, and after. The paper's: a recurrence over the tokens; a norm.
    Fastformer's: learned positions, then a norm; a bias, and logits scaled by 1/sqrt(model_dim)."""
    positions: Positions | None = None
    """What tells tokens where they stand: the paper's recurrence; a learned vector for each place;
    or nothing but the mechanism itself. Those of the ends when None; none in the fading block."""
    max_length: pydantic.PositiveInt | None = None
    """Most tokens of a text, where positions are learned."""
    convolution_size: pydantic.PositiveInt | None = None
    """Tokens, the own one included, that a causal convolution of each feature spans at the start of
    each residual branch. That of the block when None: 4 in the fading one, none in others."""
    is_causal: bool = True
    """Whether a token sees only earlier ones, and the model learns to predict the next. If not, it
    sees all, and the model learns to fill in masked ones."""
    num_heads: pydantic.PositiveInt = 24
    """Attention heads."""
    key_depth: pydantic.PositiveInt | None = None
    """Features of a query or key head; model_dim / num_heads by default."""
    value_depth: pydantic.PositiveInt | None = None
    """Features of a value head; model_dim / num_heads by default."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Type of activations in matrix products. Attention states are float32 at least."""
    param_dtype: Literal["float32", "float64"] = "float32"
    """Type of parameters."""
    remat: bool = False
    """Recompute each block in the backward pass: memory of one block instead of all. On CPUs it is
    often faster, too, since large memory taken anew at every step is slow."""
    remat_keeps: Literal["nothing", "products"] = "nothing"
    """What the forward pass keeps of a block besides its input, with `remat`: nothing more, or also
    the matrix products with its parameters, which are then not recomputed."""

    def __post_init__(self) -> None:
        if not self.turns:
            raise ValueError("attention must name at least one mechanism")
        if self.num_layers % len(self.turns):
            raise ValueError(
                f"num_layers={self.num_layers} is not a multiple of the {len(self.turns)} "
                "mechanisms that take turns"
            )
        if (self.max_length is not None) != (self.position_kind == "learned"):
            raise ValueError(
                f"max_length={self.max_length} with positions={self.position_kind!r}: learned "
                "positions are a vector for each of max_length places, others have none"
            )
        if self.convolution is not None and not self.is_causal:
            of = "convolution_size" if self.convolution_size else f"block={self.block!r}"
            raise ValueError(
                f"{of} with is_causal=False: convolutions are causal; use block='standard' and "
                "convolution_size=None"
            )
        self.mechanisms()  # refuses what does not fit
        if self.key_depth is None or self.value_depth is None:
            head_depth(self.model_dim, self.num_heads)

    @property
    def position_kind(self) -> Positions:
        """What tells tokens where they stand."""
        of_ends: Positions = "recurrence" if self.ends == "paper" else "learned"
        return self.positions or BLOCKS[self.block].positions or of_ends

    @property
    def convolution(self) -> int | None:
        """Tokens that convolutions span, if there are any."""
        return self.convolution_size or BLOCKS[self.block].convolution_size

    @property
    def turns(self) -> tuple[str, ...]:
        """The mechanisms of consecutive layers, which repeat."""
        return (self.attention,) if isinstance(self.attention, str) else self.attention

    def mechanisms(self) -> list[AttentionConfig]:
        """The configurations of `turns`."""
        known = {*self.turns, *map(str, range(len(self.turns)))}
        for option, _ in self.attention_options:
            if option.rpartition(".")[0] not in known:
                raise ValueError(
                    f"attention_options: {option!r} must begin with a mechanism's name and a dot, "
                    f"or a number of a turn: {', '.join(sorted(known))}"
                )
        return [self._mechanism(turn, name) for turn, name in enumerate(self.turns)]

    def _mechanism(self, turn: int, name: str) -> AttentionConfig:
        capabilities, config = mechanism(name).capabilities, mechanism(name).Config
        if self.is_causal and not capabilities.causal:
            raise ValueError(
                f"attention={name!r} is not causal: it would see the tokens it is to predict. With "
                "is_causal=False a model learns to fill in masked tokens"
            )
        if not self.is_causal and not capabilities.bidirectional:
            raise ValueError(f"attention={name!r} cannot see later tokens: is_causal must be True")
        known = {field.name for field in dataclasses.fields(config)}
        asked = BLOCKS[self.block].options.items()
        fields: dict[str, FieldValue] = {name: value for name, value in asked if name in known}
        sizes = {"key_depth": self.key_depth, "value_depth": self.value_depth}
        fields |= {field: size for field, size in sizes.items() if size is not None}
        for option, value in self.attention_options:
            of, _, field = option.rpartition(".")
            if of in (name, str(turn)):
                fields[field] = value
        return configure(name, **fields)


def flops_per_token(config: LanguageModelConfig, parameters: int, length: int) -> float:
    """Floating-point operations a token needs in forward and backward, as utilisation counts them.

    6 a parameter in a matrix product, the tied embedding once. Besides, of each layer and head with
    depths K and V: 12 K V of log and linear attention, whose state is written and read once; of
    softmax, grouped-query and L1 attention over a text of `length` tokens 6 (K + V) for each token
    that is seen, half of them if causal. What other mechanisms do between tokens is not counted.
    """
    key_depth = config.key_depth or config.model_dim // config.num_heads
    value_depth = config.value_depth or config.model_dim // config.num_heads
    seen = (length + 1) / 2 if config.is_causal else length
    of_state, of_tokens = 12.0 * key_depth * value_depth, 6.0 * (key_depth + value_depth) * seen
    known: dict[str, float] = {"log": of_state, "linear": of_state}
    known |= {name: of_tokens for name in ("softmax", "gqa", "l1")}
    of_turns = sum(known.get(name, 0.0) for name in config.turns)
    return 6.0 * parameters + of_turns * config.num_layers / len(config.turns) * config.num_heads
