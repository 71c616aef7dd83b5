"""A window of softmax attention, merged with log-attention over all earlier tokens."""

from heinsen_jax.ops.log_window.api import log_window_attention
from heinsen_jax.ops.log_window.state import LogWindowState

__all__ = ["LogWindowState", "log_window_attention"]
