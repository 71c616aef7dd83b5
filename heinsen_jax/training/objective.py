"""What a model learns: to predict the next token, or to fill in masked ones.

An objective maps a model, tokens `[B, T + 1]`, which of the last T are there `[B, T]`, and a
`jax.random.key` to `Predictions`.
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
    """What a model says, and what would have been right.

    Attributes:
      readout: makes logits of features.
      features: `[B, T, D]`.
      targets: `[B, T]`.
      loss_mask: `[B, T]`, which of them count.
    """

    readout: Callable[[Array], Array]
    features: Features
    targets: Integer[Array, "B T"]
    loss_mask: Bool[Array, "B T"]

    def sums(self) -> tuple[Float[Array, ""], Integer[Array, ""]]:
        """Nats, and how many of the likeliest tokens are right, over all that count."""
        with jax.named_scope("logits"):
            return cross_entropy(self.readout, self.features, self.targets, self.loss_mask)


Tokens: TypeAlias = Integer[Array, "B L"]
There: TypeAlias = Bool[Array, "B L-1"]
RandomKey: TypeAlias = Key[Array, ""]
Objective: TypeAlias = Callable[[LanguageModel, Tokens, There, RandomKey], Predictions]


def next_token(model: LanguageModel, tokens: Tokens, there: There, key: RandomKey) -> Predictions:
    """Each token is predicted from those before it."""
    del key
    features, _ = model.features(tokens[:, :-1])
    return Predictions(model.readout, features, tokens[:, 1:], there)


def objective_of(model: LanguageModelConfig, masked_fraction: float, num_tokens: int) -> Objective:
    """To predict the next token, if the model is causal; else to fill in a fraction of them."""
    return next_token if model.is_causal else MaskedTokens(masked_fraction, num_tokens)


@dataclass(frozen=True)
class MaskedTokens:
    """Some of the last T tokens, drawn at random, are predicted from the others.

    Of those drawn, 80% are replaced by the mask, 10% by any token, and 10% stay. What is not there
    is masked, too, and does not count.

    Attributes:
      fraction: of the T tokens, how many are drawn; at least one.
      num_tokens: how many ids there are. The next one is the mask.

    References:
      Devlin, Chang, Lee, Toutanova, 2019, BERT, arXiv:1810.04805, section 3.1.
    """

    fraction: float
    num_tokens: int

    def __call__(
        self, model: LanguageModel, tokens: Tokens, there: There, key: RandomKey
    ) -> Predictions:
        text = tokens[:, 1:]
        given, drawn = self.mask(text, key)
        features, _ = model.features(jnp.where(there, given, self.num_tokens))
        return Predictions(model.readout, features, text, drawn & there)

    def mask(
        self, text: Integer[Array, "B T"], key: RandomKey
    ) -> tuple[Integer[Array, "B T"], Bool[Array, "B T"]]:
        """What the model is given of text `[B, T]`, and which tokens it has to fill in: as many
        of each row."""
        keys = jax.random.split(key, 3)
        count = max(round(self.fraction * text.shape[-1]), 1)
        drawn = jax.random.permutation(
            keys[0],
            jnp.broadcast_to(jnp.arange(text.shape[-1]) < count, text.shape),
            axis=-1,
            independent=True,
        )
        way = jax.random.uniform(keys[1], text.shape)
        other = jax.random.randint(keys[2], text.shape, 0, self.num_tokens, text.dtype)
        replaced = jnp.where(way < 0.8, self.num_tokens, jnp.where(way < 0.9, other, text))
        return jnp.where(drawn, replaced, text), drawn
