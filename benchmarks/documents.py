"""Training step of the quickstart's model with separate and with continuous documents.

    python benchmarks/documents.py

The same model, with several mechanisms, is trained on rows in which tokens attend only to their own
document, and on rows without segments. A batch always has the same number of tokens; documents have
200 on average. First, rows of one document each must have the same loss as continuous rows.
Measured in interleaved runs; also the size of the programs. Needs about 3 minutes on 2 cores of an
AMD EPYC. Writes a JSON record.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from common import ROOT, interleaved_medians, write_record
from rich.console import Console
from rich.table import Table
from steps import TrainingStep

from heinsen_jax.config import load_config

TOLERANCE = 1e-5  # of losses, relative


@dataclass(frozen=True)
class Options:
    """Compare separate and continuous documents.

    Attributes:
      config: configuration of the model.
      output: path of the JSON record.
      attention: mechanisms.
      lengths: tokens per row.
      tokens: tokens per batch.
      document_length: mean number of tokens of a document.
      repeats: number of measurements of which the median is reported.
    """

    config: Path = ROOT / "configs/quickstart.py"
    output: Path = ROOT / "benchmarks/results/documents.json"
    attention: tuple[str, ...] = ("log", "softmax", "gated_deltanet")
    lengths: tuple[int, ...] = (256, 1024)
    tokens: int = 2048
    document_length: int = 200
    repeats: int = 7


def differs(separate: TrainingStep, continuous: TrainingStep) -> float:
    """Return the relative difference of the losses if each row is one document."""
    batch = separate.batch
    one = batch._replace(
        loss_mask=jnp.ones_like(batch.loss_mask), segment_ids=jnp.zeros_like(batch.tokens)
    )
    states = jax.tree.map(jnp.copy, (separate.state, continuous.state))
    losses = [
        float(step.compiled(state, rows, *step.others[1:])[1]["loss"])
        for step, state, rows in zip(
            (separate, continuous), states, (one, continuous.batch), strict=True
        )
    ]
    return abs(losses[0] - losses[1]) / losses[1]


def main(options: Options) -> int:
    console, rows = Console(), []
    base = load_config(options.config)
    table = Table("mechanism", "tokens of a row", "separate", "continuous", "ratio", "programs")
    for attention in options.attention:
        for length in options.lengths:
            data = replace(
                base.data, sequence_length=length, batch_size=max(options.tokens // length, 1)
            )
            config = replace(base, data=data, model=replace(base.model, attention=attention))
            steps = {
                name: TrainingStep(config, config.model.vocab_size, document_length)
                for name, document_length in (
                    ("separate", options.document_length),
                    ("continuous", None),
                )
            }
            if not (difference := differs(**steps)) < TOLERANCE:
                console.print(f"[red]{attention}: losses differ by {difference:.1e}; not timed")
                return 1
            seconds = interleaved_medians({**steps}, options.repeats)
            ratio = seconds["separate"] / seconds["continuous"]
            programs = {name: step.program_bytes for name, step in steps.items()}
            program_ratio = programs["separate"] / programs["continuous"]
            row = {"attention": attention, "length": length, "batch_size": data.batch_size}
            row |= {"difference": difference, "seconds": seconds, "ratio": ratio}
            rows.append(row | {"program_bytes": programs, "ratio_of_programs": program_ratio})
            times = (f"{1e3 * x:.1f} ms" for x in seconds.values())
            table.add_row(attention, str(length), *times, f"{ratio:.2f}", f"{program_ratio:.2f}")
    console.print(table)
    record = {"config": options.config.stem, "document_length": options.document_length}
    write_record(options.output, record | {"tokens": options.tokens, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
