"""Attention on a GPU, by this package and others, for `gpu_attention.py`."""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from heinsen_jax.ops import heinsen_attention, log_attention

HEADS_OF_DEPTH = {32: 24, 64: 16, 128: 8}


def segments(query: jax.Array) -> dict[str, jax.Array]:
    """Segments of 300 tokens."""
    return {"segment_ids": jnp.broadcast_to(jnp.arange(query.shape[1]) // 300, query.shape[:2])}


KINDS: dict[str, tuple[Callable, Callable]] = {
    "plain": (log_attention, lambda query: {}),
    "segments": (log_attention, segments),
    "decay": (log_attention, lambda query: {"log_decay": jnp.full(query.shape[:-1], -0.01)}),
    "heinsen": (heinsen_attention, lambda query: {}),
}
"""Functions, and their keywords."""


class Shape(NamedTuple):
    tokens: int
    length: int
    depth: int
    dtype: str
    call: str = "plain"

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        heads = HEADS_OF_DEPTH[self.depth]
        return self.tokens // self.length, self.length, heads, self.depth

    @property
    def bytes(self) -> int:
        """Bytes of one array."""
        return int(np.prod(self.sizes)) * jnp.dtype(self.dtype).itemsize


class Way(NamedTuple):
    """Implementation to measure: functions of query, key, log_value and a cotangent that return
    [output] or [output, *gradients], constructor of arrays, synchronization, and whether it is
    log-attention."""

    forward: Callable
    both: Callable
    arrays: Callable
    wait: Callable
    is_same_function: bool = True


def in_jax(function: Callable, **options: Any) -> Way:
    @partial(jax.jit, static_argnames="call")
    def forward(query, key, value, cotangent, *, call="plain"):
        return [function(query, key, value, call)]

    @partial(jax.jit, static_argnames="call")
    def both(query, key, value, cotangent, *, call="plain"):
        def attend(query, key, value):
            return function(query, key, value, call)

        output, pullback = jax.vjp(attend, query, key, value)
        return [output, *pullback(cotangent)]

    def arrays(shape: Shape) -> list[jax.Array]:
        keys = jax.random.split(jax.random.key(0), 4)
        return [jax.random.normal(key, shape.sizes, shape.dtype) for key in keys]

    return Way(forward, both, arrays, jax.block_until_ready, **options)


def in_torch(function: Callable, **options: Any) -> Way:
    torch = importlib.import_module("torch")

    def arrays(shape: Shape) -> list[Any]:
        dtype = getattr(torch, shape.dtype)
        draws = in_jax(function).arrays(shape)
        host = (torch.from_numpy(np.array(x, np.float32)) for x in draws)
        return [x.to("cuda", dtype).requires_grad_() for x in host]

    def both(query, key, value, cotangent):
        output = function(query, key, value)
        return [output, *torch.autograd.grad(output, (query, key, value), cotangent)]

    def forward(query, key, value, cotangent):
        with torch.no_grad():
            return [function(query, key, value)]

    return Way(forward, both, arrays, lambda _: torch.cuda.synchronize(), **options)


def ours(implementation, query, key, value, call):
    function, keywords = KINDS[call]
    return function(query, key, value, implementation=implementation, **keywords(query))


def softmax(query, key, value, call):
    assert call == "plain"
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def torch_softmax(query, key, value):
    functional = importlib.import_module("torch.nn.functional")
    heads_first = (x.transpose(1, 2) for x in (query, key, value))
    return functional.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def original(query, key, log_value):
    torch = importlib.import_module("torch")
    h_s = torch.logcumsumexp(key[..., :, None] + log_value[..., None, :], 1)
    h_z = torch.logcumsumexp(key, 1)
    log_s = torch.logsumexp(query[..., :, None] + h_s, -2)
    return log_s - torch.logsumexp(query + h_z, -1, keepdim=True)


def flash_linear_attention(query, key, log_value):
    torch = importlib.import_module("torch")
    chunked = importlib.import_module("fla.ops.linear_attn").chunk_linear_attn
    query, key, value = query.exp(), key.exp(), log_value.exp()
    output = chunked(query, key, value, scale=1.0, normalize=True)
    return torch.log(output[0] if isinstance(output, tuple) else output)


def ways(console: Console) -> dict[str, Way]:
    implementations = {
        "chunked": in_jax(partial(ours, "chunked")),
        "gpu": in_jax(partial(ours, "gpu")),
        "cudnn": in_jax(softmax, is_same_function=False),
    }
    if importlib.util.find_spec("torch"):
        implementations["torch softmax"] = in_torch(torch_softmax, is_same_function=False)
        implementations["torch original"] = in_torch(original)
    if importlib.util.find_spec("fla"):
        implementations["fla"] = in_torch(flash_linear_attention)
    absent = [name for name in ("torch", "fla") if not importlib.util.find_spec(name)]
    if absent:
        console.print(f"not installed, so not measured: {', '.join(absent)}")
    return implementations
