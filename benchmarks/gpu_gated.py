"""The gated delta rule on a GPU, beside the kernels of flash-linear-attention and
jax-linear-attention.

    python benchmarks/gpu_gated.py [--output benchmarks/results/gpu_gated.json]

Rules of Mamba-2 (decay by head), GLA (by key feature), Gated DeltaNet and KDA (both with erasure).
All results and gradients are first compared with the recurrence in float64 on short sequences. Then
the forward pass, and forward and backward passes are timed, for `gated_delta_rule` with different
numbers of tokens in a chunk and of chunks in a block, and for what is installed of the packages
`fla` and `jla`. On other devices than a GPU it runs with `--batch 1 --length 256`. Writes a JSON
record, after each rule.
"""

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT
from gpu_attention import seconds_of, to_numpy
from rich.console import Console
from rich.table import Table

from heinsen_jax.ops import gated_delta_rule, matrix_state
from heinsen_jax.runtime.environment import environment

RULES = ("gated_deltanet", "kda", "mamba2", "gla")
OF_FLA = {
    "mamba2": ("simple_gla", "chunk_simple_gla"),
    "gla": ("gla", "chunk_gla"),
    "gated_deltanet": ("gated_delta_rule", "chunk_gated_delta_rule"),
    "kda": ("kda", "chunk_kda"),
}
"""Modules of `fla.ops`, and their functions."""
TOLERANCE = {"bfloat16": 3e-2, "float32": 2e-3}
"""Relative error in norm; products may be in TF32."""
CHECKED_LENGTH = 200
SIZES = "CHUNK", "SMALL_CHUNK", "CHUNKS_IN_BLOCK"
"""Constants of `matrix_state`."""


@dataclass(frozen=True)
class Options:
    """Measure gated delta rules.

    Attributes:
      output: path of the JSON record.
      rules: the rules.
      batch: number of sequences.
      length: number of tokens of a sequence.
      heads: number of heads.
      depth: head dimension.
      dtype: dtype of queries, keys and values; gates are float32.
      sizes: other numbers of tokens in a chunk and of chunks in a block than the defaults, as C:J.
      repeats: number of measurements of which the median is reported.
    """

    output: Path = ROOT / "benchmarks/results/gpu_gated.json"
    rules: tuple[str, ...] = RULES
    batch: int = 8
    length: int = 4096
    heads: int = 16
    depth: int = 64
    dtype: str = "bfloat16"
    sizes: tuple[str, ...] = ("32:32", "64:8", "64:32", "128:16")
    repeats: int = 3


def draw(rule: str, options: Options, length: int) -> dict[str, np.ndarray]:
    """Arguments by name, in float32: tokens, decays, and the share that is erased and written."""
    rng = np.random.default_rng(0)
    shape = options.batch, length, options.heads, options.depth
    q, k, v = rng.standard_normal((3, *shape)).astype(np.float32)
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    is_by_feature = rule in ("gla", "kda")
    g = -0.05 * rng.exponential(size=shape if is_by_feature else shape[:-1]).astype(np.float32)
    arrays = {"q": q, "k": k, "v": v, "g": g}
    if rule in ("gated_deltanet", "kda"):
        arrays["beta"] = rng.uniform(size=shape[:-1]).astype(np.float32)
    return arrays


class Way(NamedTuple):
    """An implementation.

    Attributes:
      forward: function of the arguments by name.
      both: function of the arguments and a cotangent, for the output and the gradients.
      array: makes an array of a NumPy array and a name of a dtype.
      wait: synchronization.
      sizes: tokens in a chunk and chunks in a block of our implementation.
    """

    forward: Callable[..., Any]
    both: Callable[..., Any]
    array: Callable[[np.ndarray, str], Any]
    wait: Callable[[Any], Any]
    sizes: tuple[int, int] | None = None

    def compiled(self, *arguments: Any) -> "Way":
        """The same for arguments of these shapes; functions of PyTorch stay as they are."""
        if not isinstance(self.forward, jax.stages.Wrapped):
            return self
        assert isinstance(self.both, jax.stages.Wrapped)
        jax.clear_caches()  # traces may have other sizes
        defaults = [getattr(matrix_state, name) for name in SIZES]
        chunk, block = self.sizes or (None, None)
        for name, size, default in zip(SIZES, (chunk, chunk, block), defaults, strict=True):
            setattr(matrix_state, name, size or default)
        functions = self.forward.lower(*arguments[:1]), self.both.lower(*arguments)
        for name, size in zip(SIZES, defaults, strict=True):
            setattr(matrix_state, name, size)
        forward, both = (x.compile() for x in functions)
        return self._replace(forward=forward, both=both)


def in_jax(function: Callable[..., Any], sizes: tuple[int, int] | None = None) -> Way:
    def both(arrays: dict[str, jax.Array], cotangent: jax.Array) -> Any:
        output, pullback = jax.vjp(lambda arrays: function(**arrays), arrays)
        return output, pullback(cotangent.astype(output.dtype))[0]

    forward = jax.jit(lambda arrays: function(**arrays))
    return Way(forward, jax.jit(both), jnp.asarray, jax.block_until_ready, sizes)


def in_torch(function: Callable[..., Any]) -> Way:
    torch = importlib.import_module("torch")

    def array(x: np.ndarray, dtype: str) -> Any:
        return torch.from_numpy(x).to("cuda", getattr(torch, dtype)).requires_grad_()

    def forward(arrays: dict[str, Any]) -> Any:
        with torch.no_grad():
            return function(**arrays)[0]

    def both(arrays: dict[str, Any], cotangent: Any) -> Any:
        output = function(**arrays)[0]
        gradients = torch.autograd.grad(output, [*arrays.values()], cotangent.to(output.dtype))
        return output, dict(zip(arrays, gradients, strict=True))

    return Way(forward, both, array, lambda _: torch.cuda.synchronize())


def ours(q: Any, k: Any, v: Any, g: Any, beta: Any = None) -> jax.Array:
    shares = {} if beta is None else {"erase": beta, "write": beta}
    return gated_delta_rule(q, k, v, log_decay=g, **shares)


def ways(rule: str, options: Options) -> dict[str, Way]:
    chosen = {"ours": in_jax(ours)}
    for size in options.sizes:
        chunk, block = map(int, size.split(":"))
        chosen[f"ours {size}"] = in_jax(ours, (chunk, block))
    if importlib.util.find_spec("fla") and jax.default_backend() == "gpu":
        module, name = OF_FLA[rule]
        chosen["fla"] = in_torch(getattr(importlib.import_module(f"fla.ops.{module}"), name))
    if importlib.util.find_spec("jla"):
        call = importlib.import_module("jla.ops").linear_attention
        kind = {"mamba2": "simple_gla"}.get(rule, rule)

        def peer(implementation: str, **arrays: jax.Array) -> jax.Array:
            tokens = [arrays.pop(name) for name in "qkv"]
            return call(kind, *tokens, impl=implementation, **arrays)[0]

        for implementation in ("chunked", "mosaic_gpu"):
            chosen[f"jla {implementation}"] = in_jax(partial(peer, implementation))
    return chosen


def arguments(way: Way, arrays: dict[str, np.ndarray], dtype: str) -> tuple[dict[str, Any], Any]:
    """Arguments by name, and a cotangent; gates are float32."""
    dtypes = {name: dtype if name in "qkv" else "float32" for name in arrays}
    cotangent = np.random.default_rng(1).standard_normal(arrays["v"].shape).astype(np.float32)
    return {n: way.array(x, dtypes[n]) for n, x in arrays.items()}, way.array(cotangent, dtype)


def worst_error(way: Way, rule: str, options: Options) -> float:
    """Largest relative error in norm of the output and the gradients, for rounded arguments."""
    arrays = draw(rule, options, CHECKED_LENGTH)
    given = arguments(way, arrays, options.dtype)
    y, gradients = way.compiled(*given).both(*given)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        exact = {name: jnp.asarray(to_numpy(x)) for name, x in given[0].items()}
        reference = in_jax(recurrence).both(exact, jnp.asarray(to_numpy(given[1])))
        wanted, wanted_gradients = jax.tree.map(np.asarray, reference)
    pairs = [(y, wanted), *((gradients[name], x) for name, x in wanted_gradients.items())]
    return max(float(np.linalg.norm(to_numpy(a) - b) / np.linalg.norm(b)) for a, b in pairs)


def recurrence(q: Any, k: Any, v: Any, g: Any, beta: Any = None) -> jax.Array:
    """S_t = (I - b k k^T) exp(g) S_(t-1) + b k v^T, token by token; b = 1 without erasure, and
    no erasure then."""
    batch, _, heads, depth = q.shape

    def step(state: jax.Array, token: Any) -> Any:
        q, k, v, g, beta = token
        decay = jnp.exp(g if g.ndim == k.ndim else g[..., None])[..., None]
        state = decay * state
        if beta is not None:
            v = beta[..., None] * (v - jnp.einsum("bnk,bnkv->bnv", k, state))
        state = state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bnk,bnkv->bnv", q, state) / np.sqrt(depth)

    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), (q, k, v, g, beta))
    start = jnp.zeros((batch, heads, depth, v.shape[-1]), v.dtype)
    return jnp.moveaxis(jax.lax.scan(step, start, tokens)[1], 0, 1)


def measure(way: Way, rule: str, options: Options) -> dict[str, Any]:
    """The error and the seconds of an implementation, or the reason for their absence."""
    try:
        error = worst_error(way, rule, replace(options, batch=1))
        if not error < TOLERANCE[options.dtype]:
            return {"relative_error": error}
        given = arguments(way, draw(rule, options, options.length), options.dtype)
        compiled = way.compiled(*given)
        calls = {"forward": partial(compiled.forward, given[0])}
        calls["both"] = partial(compiled.both, *given)
        seconds = {
            name: seconds_of(call, way.wait, options.repeats) for name, call in calls.items()
        }
    except Exception as problem:  # other libraries raise any
        return {"refused": f"{type(problem).__name__}: {str(problem).splitlines()[0][:200]}"}
    return {"relative_error": error, "seconds": seconds}


def main(options: Options) -> int:
    console, wrong = Console(), []
    record: dict[str, Any] = {"environment": environment(), "rules": {}}
    record |= {name: getattr(options, name) for name in ("batch", "length", "heads", "depth")}
    table = Table("rule", "way", "error", "forward ms", "both ms")
    for rule in options.rules:
        results = record["rules"][rule] = {}
        for name, way in ways(rule, options).items():
            result = results[name] = measure(way, rule, options)
            options.output.write_text(json.dumps(record, indent=1) + "\n")
            cells = [result["refused"][:60]] if "refused" in result else []
            if "relative_error" in result:
                cells = [f"{result['relative_error']:.1e}"]
                cells += [f"{1e3 * x:.3f}" for x in result.get("seconds", {}).values()]
            table.add_row(rule, name, *cells)
            if name.startswith("ours") and "seconds" not in result:
                wrong.append(f"{rule} {name}")
    console.print(table)
    if wrong:
        console.print(f"[red]not measured: {', '.join(wrong)}")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
