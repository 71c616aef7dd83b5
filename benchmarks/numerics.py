"""Worst errors of log-attention, by implementation and dtype, over families of extreme inputs.

    python benchmarks/numerics.py [--output benchmarks/results/numerics.json]

Compared with the definition in float64 on the same inputs, rounded to the dtype. The tests use the
same families. Needs about 2 minutes on 2 cores of an AMD EPYC. Writes a JSON record.

- error of values: |difference| / (1 + |log Y| + std of the inputs), maximum over all outputs;
- error of gradients: norm of the difference / norm, for query, key and log-values together, in
  units of 1e-4 + 1e-6 max|input|; the second term is due to rounding sums of inputs.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from common import ROOT
from rich.console import Console
from rich.table import Table

from heinsen_jax.runtime.environment import environment

sys.path.insert(0, str(ROOT))

from tests.ops.log_attention import families
from tests.ops.log_attention.cases import Inputs, differentiate, in_float64, oracle

IMPLEMENTATIONS = ("scan", "chunked")
DTYPES = ("float64", "float32", "bfloat16", "float16")
FAMILIES = families.FINITE | {
    f"std {std:g}": lambda std=std: families.scaled(std) for std in (1, 10, 100, 1e4)
}
REQUIRED = {"value": 5e-6, "gradient": 1.0}  # for float32


@dataclass(frozen=True)
class Options:
    """Measure the worst errors of log-attention.

    Attributes:
      output: path of the JSON record.
    """

    output: Path = ROOT / "benchmarks/results/numerics.json"


def rounded(inputs: Inputs, dtype: str) -> Inputs | None:
    """Return inputs of a dtype, or None if it cannot represent them."""
    arrays = [jnp.asarray(x, dtype) for x in inputs[:3]]
    state = inputs.state if dtype != "float64" else in_float64(inputs.state)
    if not all(np.isfinite(np.asarray(x, np.float64)).all() for x in arrays):
        return None
    return Inputs(*arrays, state=state)


def errors(inputs: Inputs, implementation: str) -> dict[str, float]:
    wide = Inputs(*(np.asarray(x, np.float64) for x in inputs[:3]), state=inputs.state)
    actual, expected = differentiate(inputs, implementation), oracle(wide)
    std = max(float(np.std(x)) for x in wide[:3])
    output = np.asarray(actual.output, np.float64)
    value = np.abs(output - expected.output) / (1 + np.abs(expected.output) + std)

    def flat(gradients: Inputs) -> np.ndarray:
        return np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in gradients[:3]])

    have, want = flat(actual.gradients), flat(expected.gradients)
    unit = 1e-4 + 1e-6 * max(float(np.max(np.abs(x))) for x in wide[:3])
    norm = np.linalg.norm(have - want) / np.linalg.norm(want)
    return {
        "value": float(np.max(value)),
        "gradient": float(norm / unit),
        "gradient_norm": float(norm),
    }


def measure(implementation: str, dtype: str) -> dict[str, Any]:
    by_family = {}
    with jax.enable_x64(dtype == "float64"):
        for name, family in FAMILIES.items():
            inputs = rounded(family(), dtype)
            if inputs is not None:
                by_family[name] = errors(inputs, implementation)
    kinds = (*REQUIRED, "gradient_norm")
    worst = {kind: max(by_family, key=lambda name: by_family[name][kind]) for kind in kinds}
    return {
        "families": by_family,
        "worst": {kind: by_family[name][kind] for kind, name in worst.items()},
        "worst_family": worst,
        "all_finite": all(np.isfinite(list(e.values())).all() for e in by_family.values()),
    }


def readme_table(record: dict[str, Any]) -> list[str]:
    """Format the worst errors as lines of Markdown."""
    lines = ["| | values | gradients |", "|---|---|---|"]
    for implementation, by_type in record["errors"].items():
        for dtype, result in by_type.items():
            worst = result["worst"]
            cells = f"{worst['value']:.0e} | {worst['gradient_norm']:.0e}"
            lines.append(f"| `{implementation}`, {dtype} | {cells} |")
    return lines


def main(options: Options) -> int:
    console = Console()
    table = Table("implementation", "type", "values", "in", "gradients", "in", "all finite")
    results: dict[str, dict[str, Any]] = {}
    for implementation in IMPLEMENTATIONS:
        results[implementation] = {}
        for dtype in DTYPES:
            result = results[implementation][dtype] = measure(implementation, dtype)
            cells = [
                cell
                for kind in REQUIRED
                for cell in (f"{result['worst'][kind]:.1e}", result["worst_family"][kind])
            ]
            table.add_row(implementation, dtype, *cells, "yes" if result["all_finite"] else "NO")
    console.print(table)
    met = {
        implementation: by_type["float32"]["all_finite"]
        and all(by_type["float32"]["worst"][kind] <= bound for kind, bound in REQUIRED.items())
        for implementation, by_type in results.items()
    }
    record = {"environment": environment(), "errors": results, "requirements": met}
    options.output.write_text(json.dumps(record, indent=1) + "\n")
    console.print("\n".join(readme_table(record)), soft_wrap=True)
    console.print(f"float32 within {REQUIRED}: {met}\nwritten to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
