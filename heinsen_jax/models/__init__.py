"""Language models that take an attention mechanism by name."""

from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.models.flops import flops_per_token
from heinsen_jax.models.language_model import LanguageModel, LanguageModelState
from heinsen_jax.models.pattern import Layers

__all__ = [
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelState",
    "Layers",
    "flops_per_token",
]
