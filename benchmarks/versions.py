"""Compare this checkout with another commit: compilation, speed, decoding and memory.

    python benchmarks/versions.py --commit COMMIT [--output benchmarks/results/versions.json]

Both packages are imported into one process and measured in interleaved runs: CPU-seconds of
lowering and compiling value and gradient; their seconds at 1024 tokens, on inputs for the fast tier
and for the exact tier; one decoding step of the quickstart's model; temporary memory, as allocated
by XLA, at 1024 and 16,384 tokens. The quickstart is trained by each in a separate process, one
after the other, on prepared data: seconds up to its first update and to its end. Each commit uses
its own configuration. Needs about 15 minutes on 2 cores of an AMD EPYC. Writes a JSON record.
"""

import importlib
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT, SETTING, interleaved_medians
from compile_cases import QKV, TOKENS, Case, decayed
from compile_time import cpu_seconds
from flax import nnx
from tiers import differentiate, in_linear_space, inputs

from heinsen_jax.runtime.environment import environment

LENGTH, LONG = 1024, 16_384
GENERATED = 256  # tokens
MODEL = {
    "vocab_size": 264,
    "model_dim": 128,
    "num_layers": 4,
    "num_heads": 4,
}  # sizes of the quickstart
Part = Literal["compile", "run", "decode", "memory", "quickstart"]


@dataclass(frozen=True)
class Options:
    """Compare this checkout with another commit.

    Attributes:
      commit: commit of this repository.
      parts: parts to measure.
      repeats: number of measurements of which the median is reported.
      output: path of the JSON record.
    """

    commit: str
    parts: tuple[Part, ...] = ("compile", "run", "decode", "memory", "quickstart")
    repeats: int = 9
    output: Path = ROOT / "benchmarks/results/versions.json"


def extract(commit: str, folder: Path) -> None:
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder, filter="data")


def load(folder: Path, *names: str) -> list[ModuleType]:
    """Import the package from a folder, in addition to modules that are already imported."""
    package_modules = [name for name in sys.modules if name.split(".")[0] == "heinsen_jax"]
    kept = {name: sys.modules.pop(name) for name in package_modules}
    sys.path.insert(0, str(folder))
    try:
        modules = [importlib.import_module(f"heinsen_jax.{name}") for name in names]
    finally:
        sys.path.remove(str(folder))
        for name in [name for name in sys.modules if name.split(".")[0] == "heinsen_jax"]:
            del sys.modules[name]
        sys.modules.update(kept)
    assert all(str(module.__file__).startswith(str(folder)) for module in modules)
    return modules


def compilation(versions: dict[str, ModuleType], repeats: int) -> dict[str, Any]:
    cases: dict[str, Callable[[ModuleType], Case]] = {
        "heinsen_attention": lambda ops: Case(ops.heinsen_attention, QKV),
        "log_attention": lambda ops: Case(ops.log_attention, QKV),
        "log_attention, decay": lambda ops: Case(
            partial(decayed, ops.log_attention), (*QKV, TOKENS)
        ),
        "log_attention, scan": lambda ops: Case(
            partial(ops.log_attention, implementation="scan"), QKV
        ),
        "linear_attention": lambda ops: Case(ops.linear_attention, QKV),
    }
    results: dict[str, Any] = {}
    for name, case in cases.items():
        seconds: dict[str, list[float]] = {version: [] for version in versions}
        size = {}
        for _ in range(-(-repeats // 3)):
            for version, ops in versions.items():
                taken, size[version] = cpu_seconds(case(ops))
                seconds[version].append(taken)
        medians = {version: statistics.median(x) for version, x in seconds.items()}
        results[name] = {"cpu_seconds": medians, "bytes": size}
    return results


def running(versions: dict[str, ModuleType], repeats: int) -> dict[str, Any]:
    results = {}
    for op in ("log_attention", "heinsen_attention"):
        for name, (arguments, cotangent) in inputs(LENGTH).items():
            if op == "heinsen_attention":
                if name.startswith("three"):
                    continue
                arguments = in_linear_space(arguments)
            calls = {
                version: partial(
                    jax.jit(partial(differentiate, getattr(ops, op))), arguments, cotangent
                )
                for version, ops in versions.items()
            }
            results[f"{op}, tier {name}"] = {"seconds": interleaved_medians(calls, repeats)}
    return results


def memory(versions: dict[str, ModuleType]) -> dict[str, Any]:
    results = {}
    for length in (LENGTH, LONG):  # the same for every tier: one program contains all
        arguments, cotangent = inputs(length)["one"]
        added = {}
        for version, ops in versions.items():
            function = jax.jit(partial(differentiate, ops.log_attention))
            compiled = function.lower(arguments, cotangent).compile()
            analysis = compiled.memory_analysis()
            assert analysis is not None
            added[version] = analysis.temp_size_in_bytes
        results[f"log_attention, length {length}"] = {"temporary_bytes": added}
    return results


def decoding(folders: dict[str, Path], repeats: int) -> dict[str, Any]:
    calls = {}
    for version, folder in folders.items():
        generate, models = load(folder, "generate", "models")
        model = models.LanguageModel(models.LanguageModelConfig(**MODEL), rngs=nnx.Rngs(0))
        tokens = jnp.asarray(np.random.default_rng(0).integers(0, 255, (1, 32)))
        calls[version] = partial(generate.generate, model, tokens, GENERATED, key=jax.random.key(0))
    seconds = interleaved_medians(calls, repeats)
    return {"seconds_per_token": {version: s / GENERATED for version, s in seconds.items()}}


def quickstart(folders: dict[str, Path]) -> dict[str, Any]:
    """Return seconds from the start of a process. A first process prepares the data."""
    results: dict[str, Any] = {"first_update": {}, "seconds": {}, "validation_loss": {}}
    for version, folder in folders.items():
        settings = (folder / "heinsen_jax/training/config.py").read_text()
        reported = "log" if "log_every" in settings else "report"
        one_update = ("--training.steps", "1", f"--training.{reported}-every", "1")
        one_update += ("--optimizer.warmup-steps", "0", "--training.evaluate-every", "1")
        _train(folder, *one_update)
        _, results["first_update"][version], _ = _train(folder, *one_update)
        seconds, _, rows = _train(folder)
        losses = [row["validation/loss"] for row in rows if "validation/loss" in row]
        results["seconds"][version], results["validation_loss"][version] = seconds, losses[-1]
    return results


def _train(folder: Path, *options: str) -> tuple[float, float, list[dict[str, float]]]:
    """Return seconds until the process ends and until the first row of metrics, and all rows."""
    with tempfile.TemporaryDirectory() as workdir, tempfile.TemporaryFile() as errors:
        command = [sys.executable, "train.py", "--config", "configs/quickstart.py"]
        command += ["--workdir", workdir, *options]
        environment = os.environ | {"PYTHONPATH": str(folder), "JAX_ENABLE_COMPILATION_CACHE": "0"}
        start = time.monotonic()
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=errors
        )
        first = None
        while process.poll() is None:
            if first is None and _rows(Path(workdir)):
                first = time.monotonic() - start
            time.sleep(0.05)
        seconds = time.monotonic() - start
        if process.returncode or first is None:
            errors.seek(0)
            raise RuntimeError(f"{' '.join(command)} in {folder}: {errors.read().decode()}")
        return seconds, first, _rows(Path(workdir))


def _rows(workdir: Path) -> list[dict[str, float]]:
    file = workdir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def main(options: Options) -> int:
    with tempfile.TemporaryDirectory() as old, tempfile.TemporaryDirectory() as new:
        folders = {"before": Path(old), "now": Path(new)}
        extract(options.commit, folders["before"])
        extract("HEAD", folders["now"])
        ops = {version: load(folder, "ops")[0] for version, folder in folders.items()}
        measures: dict[str, Callable[[], Any]] = {
            "compile": lambda: compilation(ops, options.repeats),
            "run": lambda: running(ops, options.repeats),
            "decode": lambda: decoding(folders, options.repeats),
            "memory": lambda: memory(ops),
            "quickstart": lambda: quickstart(folders),
        }
        record: dict[str, Any] = {
            "environment": environment(),
            "before": options.commit,
            "setting": SETTING,
        }
        for part in options.parts:
            record[part] = measures[part]()
            print(part, json.dumps(record[part], indent=2), flush=True)
            options.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)
    sys.exit(main(tyro.cli(Options)))
