"""Speed of log-attention, of the gated delta rule, and of other implementations of them and of
attention, in interleaved runs.

    pip install torch        # for this benchmark only; or: pip install jax-linear-attention
    python benchmarks/comparison.py --peers torch
    python benchmarks/comparison.py --peers jla    # Python 3.12 or newer

Forward and backward, float32, one sequence, 8 heads of dimension 32, causal, output and all three
gradients. Peers:

- original: eqs. (3)-(6) of Heinsen (2024) in PyTorch, by `torch.logcumsumexp`, as first published;
- softmax: `torch.nn.functional.scaled_dot_product_attention`;
- jla: jax-linear-attention's chunked linear attention, on exponentiated queries and keys. It has no
scaling: correct for moderate inputs only.

With jla, `gated_delta_rule` is compared with that library's functions of the same mechanisms, too.

Needs about 2 minutes on 2 cores of an AMD EPYC. Writes one JSON record per group of peers.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # waiting threads of one library slow down the others

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT, SETTING, interleaved_medians, random_tokens
from rich.console import Console
from rich.table import Table

from heinsen_jax.ops import gated_delta_rule, log_attention
from heinsen_jax.runtime.environment import environment

LENGTHS = (1024, 4096)
REQUIRED = {  # required speed-up over each peer, at each length
    "original": {1024: 100, 4096: 100},
    "softmax": {1024: 4, 4096: 10},
    "jla": {1024: 1, 4096: 1},
}
GATED_REQUIRED = 1 / 1.2  # of `gated_delta_rule`, over jla


@dataclass(frozen=True)
class Options:
    """Compare log-attention with other implementations.

    Attributes:
      peers: group of implementations to compare with; their packages must be installed.
      output: path of the JSON record; benchmarks/results/comparison_PEERS.json when None.
      repeats: number of measurements of which the median is reported.
    """

    peers: Literal["torch", "jla"] = "torch"
    output: Path | None = None
    repeats: int = 7


def in_jax(function: Callable) -> Callable:
    """Convert function(query, key, log_value) to a call that returns its output and gradients."""

    @jax.jit
    def differentiate(query, key, log_value, cotangent):
        output, pullback = jax.vjp(function, query, key, log_value)
        return output, *pullback(cotangent)

    return lambda arrays: partial(differentiate, *arrays)


def jla(query, key, log_value):
    simple_gla = importlib.import_module("jla.ops.chunked").simple_gla
    value = jnp.exp(log_value)
    value = jnp.concatenate([value, jnp.ones_like(value[..., :1])], -1)  # S and Z in one call
    no_decay = jnp.zeros(query.shape[:-1])
    sums, _ = simple_gla(jnp.exp(query), jnp.exp(key), value, no_decay, scale=1.0)
    return jnp.log(sums[..., :-1]) - jnp.log(sums[..., -1:])


def gated_mechanisms() -> dict[str, tuple[Callable, Callable]]:
    """Return `gated_delta_rule` and jla's function of each mechanism, called with query, key,
    value, log decays by head and by feature, and the share that is erased and written."""
    chunked = importlib.import_module("jla.ops.chunked")

    def gated(by_feature: bool, erases: bool) -> Callable:
        def call(query, key, value, head_decay, feature_decay, share):
            options = {"erase": share, "write": share} if erases else {}
            decay = feature_decay if by_feature else head_decay
            return gated_delta_rule(query, key, value, log_decay=decay, **options)

        return call

    return {
        "mamba2": (gated(False, False), lambda q, k, v, g, f, b: chunked.simple_gla(q, k, v, g)[0]),
        "gla": (gated(True, False), lambda q, k, v, g, f, b: chunked.gla(q, k, v, f)[0]),
        "gated_deltanet": (
            gated(False, True),
            lambda q, k, v, g, f, b: chunked.gated_delta_rule(q, k, v, g, b)[0],
        ),
        "kda": (gated(True, True), lambda q, k, v, g, f, b: chunked.kda(q, k, v, f, b)[0]),
    }


def compare_gated(length: int, repeats: int) -> dict[str, Any]:
    """Return seconds and the speed-up of each mechanism, whose results must be equal."""
    query, key, value, cotangent = random_tokens(length)
    query, key = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    rng = np.random.default_rng(1)
    feature_decay = -0.05 * rng.exponential(size=key.shape).astype(np.float32)
    head_decay = -0.1 * rng.exponential(size=key.shape[:-1]).astype(np.float32)
    share = rng.uniform(size=key.shape[:-1]).astype(np.float32)
    arrays = query, key, value, *map(jnp.asarray, (head_decay, feature_decay, share))
    results = {}
    for name, pair in gated_mechanisms().items():

        def differentiate(function: Callable) -> Callable:
            @jax.jit
            def run(arrays, cotangent):
                output, pullback = jax.vjp(lambda *arrays: function(*arrays), *arrays)
                return output, pullback(cotangent)

            return partial(run, arrays, cotangent)

        ours, peer = map(differentiate, pair)
        calls: dict[str, Callable[[], Any]] = {"ours": ours, "jla": peer}
        outputs = [jax.tree.leaves(call()) for call in calls.values()]
        pairs = [(a, b) for a, b in zip(*outputs, strict=True) if jnp.any(a) or jnp.any(b)]
        error = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a))) for a, b in pairs)
        assert error < 1e-5, f"{name} differs by {error:.1e}"
        seconds = interleaved_medians(calls, repeats)
        ratio = seconds["jla"] / seconds["ours"]
        results[name] = {
            "seconds": seconds,
            "times_as_fast": ratio,
            "largest_difference": error,
            "met": ratio >= GATED_REQUIRED,
        }
    return results


def in_torch(function: Callable) -> Callable:
    torch = importlib.import_module("torch")

    def prepare(arrays: list[jax.Array]) -> Callable:
        *inputs, cotangent = (torch.from_numpy(np.asarray(x).swapaxes(1, 2).copy()) for x in arrays)
        inputs = [x.requires_grad_() for x in inputs]

        def differentiate():
            output = function(*inputs)
            gradients = torch.autograd.grad(output, inputs, cotangent)
            return [x.detach().transpose(1, 2).numpy() for x in (output, *gradients)]

        return differentiate

    return prepare


def original(query, key, log_value):
    torch = importlib.import_module("torch")
    h_s = torch.logcumsumexp(key[..., :, None] + log_value[..., None, :], -3)
    h_z = torch.logcumsumexp(key, -2)
    log_s = torch.logsumexp(query[..., :, None] + h_s, -2)
    return log_s - torch.logsumexp(query + h_z, -1, keepdim=True)


def softmax(query, key, value):
    functional = importlib.import_module("torch.nn.functional")
    return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


def functions_of(peers: str) -> dict[str, Callable]:
    ours = in_jax(partial(log_attention, implementation="chunked"))
    if peers == "jla":
        return {"ours": ours, "jla": in_jax(jla)}
    importlib.import_module("torch").set_num_threads(os.cpu_count() or 1)
    return {"ours": ours, "original": in_torch(original), "softmax": in_torch(softmax)}


def compare(functions: dict[str, Callable], length: int, repeats: int) -> dict[str, Any]:
    arrays = random_tokens(length)
    calls = {name: prepare(arrays) for name, prepare in functions.items()}
    expected = calls["ours"]()
    for name, call in calls.items():
        if name != "softmax":  # another function
            for have, want in zip(call(), expected, strict=True):
                error = np.max(np.abs(np.asarray(have) - want)) / np.max(np.abs(want))
                assert error < 1e-4, f"{name} differs by {error:.1e}"
    seconds = interleaved_medians(calls, repeats)
    ratios = {name: seconds[name] / seconds["ours"] for name in seconds if name != "ours"}
    met = {name: ratios[name] >= REQUIRED[name][length] for name in ratios}
    return {"seconds": seconds, "times_as_fast": ratios, "requirements": met}


def main(options: Options) -> int:
    console = Console()
    functions = functions_of(options.peers)
    package = {"torch": "torch", "jla": "jax-linear-attention"}[options.peers]
    record: dict[str, Any] = {
        "environment": environment() | {package: version(package)},
        "setting": SETTING,
        "lengths": {n: compare(functions, n, options.repeats) for n in LENGTHS},
    }
    table = Table("tokens", "", "ms", "ours is times as fast", "required", "met")
    for length, result in record["lengths"].items():
        for name, seconds in result["seconds"].items():
            cells = ["", "", ""]
            if name != "ours":
                met = "yes" if result["requirements"][name] else "no"
                ratio = f"{result['times_as_fast'][name]:.1f}"
                cells = [ratio, str(REQUIRED[name][length]), met]
            table.add_row(str(length), name, f"{1e3 * seconds:.2f}", *cells)
    if options.peers == "jla":
        record["gated_delta_rule"] = {n: compare_gated(n, options.repeats) for n in LENGTHS}
        for length, results in record["gated_delta_rule"].items():
            for name, result in results.items():
                seconds, met = result["seconds"], "yes" if result["met"] else "no"
                table.add_row(str(length), f"{name}, ours", f"{1e3 * seconds['ours']:.2f}")
                ratio = f"{result['times_as_fast']:.2f}", f"{GATED_REQUIRED:.2f}", met
                table.add_row(str(length), f"{name}, jla", f"{1e3 * seconds['jla']:.2f}", *ratio)
    console.print(table)
    output = options.output or ROOT / f"benchmarks/results/comparison_{options.peers}.json"
    output.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {output}")
    results = record.get("gated_delta_rule", {}).values()
    is_met = all(result["met"] for by_peer in results for result in by_peer.values())
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
