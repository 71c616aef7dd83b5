"""Sampling with explicit state: tokens, texts, and saved states."""

from heinsen_jax.generate.engine import Engine
from heinsen_jax.generate.sampling import filter_logits
from heinsen_jax.generate.states import load_state, repeat_state, save_state
from heinsen_jax.generate.text import complete, decode_stream, sample
from heinsen_jax.generate.tokens import generate, stream

__all__ = [
    "Engine",
    "complete",
    "decode_stream",
    "filter_logits",
    "generate",
    "load_state",
    "repeat_state",
    "sample",
    "save_state",
    "stream",
]
