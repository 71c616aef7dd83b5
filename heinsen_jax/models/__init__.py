"""Language models that take an attention mechanism by name."""

from heinsen_jax.models.language_model import (
    LanguageModel,
    LanguageModelConfig,
    LanguageModelState,
    flops_per_token,
)

__all__ = ["LanguageModel", "LanguageModelConfig", "LanguageModelState", "flops_per_token"]
