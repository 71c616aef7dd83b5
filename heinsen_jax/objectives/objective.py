"""Objectives: predict the next token, or masked tokens.

An objective maps a model, a batch and a `jax.random.key` to `Predictions`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

from heinsen_jax.data import Batch
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.objectives.cross_entropy import cross_entropy
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
        """Sum of the losses in nats, and number of correct predictions, over the predictions that
        count; `z_loss` as for `cross_entropy`."""
        predicted = self.features, self.targets, self.loss_mask
        with jax.named_scope("logits"):
            return cross_entropy(self.readout, *predicted, z_loss=z_loss)


RandomKey: TypeAlias = Key[Array, ""]


@runtime_checkable
class Losses(Protocol):
    """Losses of a batch, such as `Predictions`."""

    @property
    def loss_mask(self) -> Bool[Array, "B T"]: ...

    def sums(self, z_loss: float = 0.0) -> tuple[Float[Array, ""], Integer[Array, ""]]: ...


Objective: TypeAlias = Callable[[LanguageModel, Batch, RandomKey], Predictions]


def next_token(model: LanguageModel, batch: Batch, key: RandomKey) -> Predictions:
    """Predict each token from the previous tokens of its segment; or each token's label from these
    and the token itself."""
    del key
    segment_ids = None if batch.segment_ids is None else batch.segment_ids[:, :-1]
    features, _ = model.features(batch.tokens[:, :-1], segment_ids=segment_ids)
    targets, loss_mask = jnp.asarray(batch.targets), jnp.asarray(batch.loss_mask)
    return Predictions(model.readout, features, targets, loss_mask)


def objective_of(model: LanguageModelConfig, masked_fraction: float, num_tokens: int) -> Objective:
    """Next-token prediction for causal models, else masked-token prediction."""
    return next_token if model.is_causal else MaskedTokens(masked_fraction, num_tokens)


@dataclass(frozen=True)
class MaskedTokens:
    """Predict a random part of the last T tokens from the others.

    The mask replaces 80% of the drawn tokens, a random token 10%, and 10% stay. Padding is masked,
    too, and does not count; with segments, it is a segment of its own instead, and the first tokens
    of segments, which never count, are visible.

    Attributes:
      fraction: fraction of the T tokens that is drawn; at least one token.
      num_tokens: number of token ids; the next id is the mask.

    References:
      Devlin, Chang, Lee, Toutanova, 2019, BERT, arXiv:1810.04805, section 3.1.
    """

    fraction: float
    num_tokens: int

    def __call__(self, model: LanguageModel, batch: Batch, key: RandomKey) -> Predictions:
        if batch.labels is not None:
            raise ValueError("labels: masked tokens have none; use the objective next_token")
        tokens, loss_mask, segment_ids, _ = jax.tree.map(jnp.asarray, batch)
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
        if targets.dtype.itemsize < 4:  # may lack the id of masked tokens
            targets = targets.astype(jnp.int32)
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
