"""Objectives: predict the next token, or masked tokens.

An objective maps a model, tokens `[B, T + 1]`, the mask `[B, T]` of predictions that count, a
`jax.random.key`, and the segments of the tokens `[B, T + 1]`, if any, to `Predictions`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.training.cross_entropy import cross_entropy
from heinsen_jax.typing import Array, Bool, Features, Float, Integer, Key


class Predictions(NamedTuple):
    """Predictions of a model and their targets.

    Attributes:
      readout: maps features to logits.
      features: `[B, T, D]`.
      targets: `[B, T]`.
      loss_mask: `[B, T]`, the predictions that count.
    """

    readout: Callable[[Array], Array]
    features: Features
    targets: Integer[Array, "B T"]
    loss_mask: Bool[Array, "B T"]

    def sums(self, z_loss: float = 0.0) -> tuple[Float[Array, ""], Integer[Array, ""]]:
        """Sum of the losses in nats, and number of correct predictions, over those that count;
        `z_loss` as for `cross_entropy`."""
        predicted = self.features, self.targets, self.loss_mask
        with jax.named_scope("logits"):
            return cross_entropy(self.readout, *predicted, z_loss=z_loss)


Tokens: TypeAlias = Integer[Array, "B L"]
LossMask: TypeAlias = Bool[Array, "B L-1"]
RandomKey: TypeAlias = Key[Array, ""]
SegmentIds: TypeAlias = Integer[Array, "B L"]
Objective: TypeAlias = Callable[
    [LanguageModel, Tokens, LossMask, RandomKey, SegmentIds | None], Predictions
]


def next_token(
    model: LanguageModel,
    tokens: Tokens,
    loss_mask: LossMask,
    key: RandomKey,
    segment_ids: SegmentIds | None = None,
) -> Predictions:
    """Predict each token from the previous ones of its segment."""
    del key
    given = None if segment_ids is None else segment_ids[:, :-1]
    features, _ = model.features(tokens[:, :-1], segment_ids=given)
    return Predictions(model.readout, features, tokens[:, 1:], loss_mask)


def objective_of(model: LanguageModelConfig, masked_fraction: float, num_tokens: int) -> Objective:
    """Next-token prediction for causal models, else masked-token prediction."""
    return next_token if model.is_causal else MaskedTokens(masked_fraction, num_tokens)


@dataclass(frozen=True)
class MaskedTokens:
    """Predict a random part of the last T tokens from the others.

    Of the drawn tokens, 80% are replaced by the mask, 10% by a random token, and 10% stay. Padding
    is masked, too, and does not count; with segments it has one of its own instead. Then the first
    tokens of segments, which are never counted, are visible.

    Attributes:
      fraction: fraction of the T tokens that is drawn; at least one token.
      num_tokens: number of token ids; the next id is the mask.

    References:
      Devlin, Chang, Lee, Toutanova, 2019, BERT, arXiv:1810.04805, section 3.1.
    """

    fraction: float
    num_tokens: int

    def __call__(
        self,
        model: LanguageModel,
        tokens: Tokens,
        loss_mask: LossMask,
        key: RandomKey,
        segment_ids: SegmentIds | None = None,
    ) -> Predictions:
        targets = tokens[:, 1:]
        given, drawn = self.mask(targets, key)
        if segment_ids is None:
            given = jnp.where(loss_mask, given, self.num_tokens)
        else:
            segment_ids = segment_ids[:, 1:]
        features, _ = model.features(given, segment_ids=segment_ids)
        return Predictions(model.readout, features, targets, drawn & loss_mask)

    def mask(
        self, targets: Integer[Array, "B T"], key: RandomKey
    ) -> tuple[Integer[Array, "B T"], Bool[Array, "B T"]]:
        """The masked input `[B, T]`, and the mask of drawn tokens, the same number in each row."""
        keys = jax.random.split(key, 3)
        count = max(round(self.fraction * targets.shape[-1]), 1)
        drawn = jax.random.permutation(
            keys[0],
            jnp.broadcast_to(jnp.arange(targets.shape[-1]) < count, targets.shape),
            axis=-1,
            independent=True,
        )
        way = jax.random.uniform(keys[1], targets.shape)
        other = jax.random.randint(keys[2], targets.shape, 0, self.num_tokens, targets.dtype)
        replaced = jnp.where(way < 0.8, self.num_tokens, jnp.where(way < 0.9, other, targets))
        return jnp.where(drawn, replaced, targets), drawn
