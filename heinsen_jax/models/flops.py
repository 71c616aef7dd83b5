"""Floating-point operations of a model, for model FLOPs utilization (MFU)."""

from heinsen_jax.models.config import LanguageModelConfig


def flops_per_token(config: LanguageModelConfig, parameters: int, length: int) -> float | None:
    """Model FLOPs per token of a forward and backward pass over sequences of `length` tokens; None
    if a mechanism does not count its own.

    Each parameter counts 6, all parameters included; the embedding counts once, as the readout. In
    addition, each layer counts 3 times the products of its mechanism, `AttentionConfig.flops`, such
    as 4 K V for each head of log-attention, which writes and reads its state once; chunked
    implementations need more.
    """

    if not config.tie_embeddings:
        parameters -= config.vocab_size * config.model_dim
    pattern, sizes = config.mechanisms(), (config.model_dim, config.num_heads)
    products = [mechanism.flops(*sizes, length, config.is_causal) for mechanism in pattern]
    counted = [x for x in products if x is not None]
    if len(counted) < len(products):
        return None
    return 6.0 * parameters + 3.0 * sum(counted) * config.num_layers / len(pattern)
