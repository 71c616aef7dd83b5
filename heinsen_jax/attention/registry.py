"""Every mechanism by name."""

from collections.abc import Callable
from typing import Any

from flax import nnx

from heinsen_jax.attention.base import Attention
from heinsen_jax.attention.log import LogAttention

_MECHANISMS: dict[str, Callable[..., Attention]] = {"log": LogAttention}


def names() -> tuple[str, ...]:
    """The names that `build` knows."""
    return tuple(_MECHANISMS)


def build(name: str, *, model_dim: int, num_heads: int, rngs: nnx.Rngs, **config: Any) -> Attention:
    """A mechanism by name, with its own configuration as further keywords.

    Raises:
      ValueError: there is no mechanism of this name.
    """
    if name not in _MECHANISMS:
        raise ValueError(f"no attention mechanism {name!r}; there are: {', '.join(names())}")
    return _MECHANISMS[name](model_dim, num_heads, rngs=rngs, **config)
