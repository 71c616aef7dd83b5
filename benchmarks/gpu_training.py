"""Training steps of the 125M model on one GPU: tokens per second and model FLOPs utilization.

    python benchmarks/gpu_training.py [--output benchmarks/results/gpu_training.json]

Measures all combinations of batch size, rematerialization policy and attention on random tokens:
implementations of log-attention (the "gpu" kernels are experimental), and softmax attention by
cuDNN in otherwise the same model. Then profiles the fastest log-attention. All steps are compiled
first, several at a time, except their initialization. Model FLOPs are computed by
`flops_per_token`, with causal attention counted by half; the peak is the datasheet's for dense
bfloat16. Needs a GPU of the Hopper generation; other devices need a smaller `--config`. Writes a
JSON record.
"""

import json
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import tyro
from common import ROOT, interleaved_medians, with_implementation
from rich.console import Console
from rich.table import Table
from steps import TrainingStep, profile

from heinsen_jax.config import ExperimentConfig, load_config
from heinsen_jax.models import Layers, flops_per_token
from heinsen_jax.runtime.environment import environment
from heinsen_jax.training.utilization import PEAK_FLOPS, model_flops_utilization

REMAT_POLICIES = {
    "all": {"remat": False},
    "products": {"remat": True, "remat_policy": "dots_with_no_batch_dims_saveable"},
    "nothing": {"remat": True, "remat_policy": "nothing_saveable"},
}
REQUIRED = 0.4
COMPILED_AT_A_TIME = 4


@dataclass(frozen=True)
class Options:
    """Measure training steps.

    Attributes:
      config: configuration of a model with log-attention.
      output: path of the JSON record.
      rows: batch sizes.
      remat_policies: residuals that are saved for the backward pass.
      implementations: implementations of log-attention, or "softmax".
      repeats: number of measurements of which the median is reported.
    """

    config: Path = ROOT / "configs/heinsen_125m_pile.py"
    output: Path = ROOT / "benchmarks/results/gpu_training.json"
    rows: tuple[int, ...] = (16, 32, 64)
    remat_policies: tuple[str, ...] = tuple(REMAT_POLICIES)
    implementations: tuple[str, ...] = ("chunked", "gpu", "softmax")
    repeats: int = 5


def with_choices(
    config: ExperimentConfig, rows: int, remat_policy: str, implementation: str
) -> ExperimentConfig:
    if implementation == "softmax":
        layers = Layers("softmax", options={"implementation": "cudnn"})
        model = replace(config.model, attention=layers)
    else:
        model = with_implementation(config.model, implementation)
    model = replace(model, **REMAT_POLICIES[remat_policy])
    return replace(config, model=model, data=replace(config.data, batch_size=rows))


def measure(
    config: ExperimentConfig, compiling: Future[TrainingStep], repeats: int
) -> dict[str, Any]:
    """Measure a configuration; without results if it has no kernel or exceeds the memory."""
    try:
        step = compiling.result()
    except NotImplementedError as error:
        return {"refused": str(error).splitlines()[0]}
    try:
        (seconds,) = interleaved_medians({"step": step}, repeats).values()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return {"refused": str(error).splitlines()[0]}
    finally:
        step.free()
    rows, length = config.data.batch_size, config.data.sequence_length
    tokens_per_second = rows * length / seconds
    flops = flops_per_token(config.model, step.parameters, length)
    memory = step.compiled.memory_analysis()
    return {
        "seconds": seconds,
        "tokens_per_second": tokens_per_second,
        "utilization": model_flops_utilization(tokens_per_second, flops, 1),
        "bytes": memory.argument_size_in_bytes + memory.temp_size_in_bytes,
    }


def main(options: Options) -> int:
    console = Console()
    base = load_config(options.config)
    record: dict[str, Any] = {
        "environment": environment(),
        "config": options.config.stem,
        "length": base.data.sequence_length,
        "peak": PEAK_FLOPS.get(jax.devices()[0].device_kind),
        "requirement": REQUIRED,
        "steps": [],
    }
    table = Table("rows", "remat_policy", "implementation", "ms", "tokens/s", "of peak", "GB")
    choices = [
        (rows, remat_policy, implementation)
        for implementation in options.implementations
        for remat_policy in options.remat_policies
        for rows in options.rows
    ]
    configs = {choice: with_choices(base, *choice) for choice in choices}
    best: tuple[float, Any] = 0.0, None
    with ThreadPoolExecutor(COMPILED_AT_A_TIME) as pool:
        compiling = {
            choice: pool.submit(TrainingStep, config, config.model.vocab_size)
            for choice, config in configs.items()
        }
    for choice, config in configs.items():
        result = measure(config, compiling[choice], options.repeats)
        record["steps"].append(
            dict(zip(("rows", "remat_policy", "implementation"), choice, strict=True)) | result
        )
        options.output.write_text(json.dumps(record, indent=1) + "\n")  # also if interrupted
        if "refused" in result:
            table.add_row(*map(str, choice), result["refused"][:60])
            continue
        if result["tokens_per_second"] > best[0] and choice[-1] != "softmax":
            best = result["tokens_per_second"], choice
        table.add_row(
            *map(str, choice),
            f"{1e3 * result['seconds']:.1f}",
            f"{result['tokens_per_second']:,.0f}",
            f"{result['utilization']:.3f}" if result["utilization"] else "",
            f"{result['bytes'] / 1e9:.1f}",
        )
    console.print(table)
    if best[1] is None:
        console.print("[red]no step could be run")
        return 1
    shares = profile(compiling[best[1]].result(), steps=5)
    record["profile"] = {"of": best[1], "share_of_time": shares}
    for part, share in shares.items():
        console.print(f"{part:15s} {100 * share:.0f}%")
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    console.print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
