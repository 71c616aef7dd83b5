"""Training step of `shakespeare_char_cpu`, compared with a GPT-2 block model in PyTorch.

    pip install torch        # for this benchmark only
    python benchmarks/training_step.py

The peer is the model that nanoGPT trains on a CPU: 4 layers of 4 heads and width 128, no biases, no
dropout, tied embeddings, `scaled_dot_product_attention`, 0.8M parameters; AdamW with clipping,
eager mode. Both train on batches of 12 x 64 random bytes, forward, backward and update, in
interleaved runs. Also reports the share of each part in the time of our step, from a trace of the
profiler. Needs about 2 minutes on 2 cores of an AMD EPYC. Writes a JSON record.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_WAIT_POLICY", "passive"
)  # waiting threads of one library slow down the others

import tyro
from common import ROOT, interleaved_medians
from rich.console import Console
from rich.table import Table
from steps import TrainingStep, profile

from heinsen_jax.config import load_config
from heinsen_jax.runtime.environment import environment

PEER = {"layers": 4, "heads": 4, "width": 128, "vocabulary": 65}  # nanoGPT's sizes for CPUs


@dataclass(frozen=True)
class Options:
    """Compare training steps.

    Attributes:
      config: configuration of our model.
      output: path of the JSON record.
      repeats: number of measurements of which the median is reported.
    """

    config: Path = ROOT / "configs/shakespeare_char_cpu.py"
    output: Path = ROOT / "benchmarks/results/training_step.json"
    repeats: int = 15


def peer(batch: int, length: int) -> tuple[Callable[[], Any], int]:
    """Return a step of the model in PyTorch, and the number of its parameters."""
    torch = importlib.import_module("torch")
    nn, functional = torch.nn, torch.nn.functional
    torch.set_num_threads(os.cpu_count() or 1)
    width, heads = PEER["width"], PEER["heads"]

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(width, bias=False) for _ in range(2))
            self.project = nn.Linear(width, 3 * width, bias=False)
            self.output = nn.Linear(width, width, bias=False)
            self.up = nn.Linear(width, 4 * width, bias=False)
            self.down = nn.Linear(4 * width, width, bias=False)

        def forward(self, x):
            heads_of = [
                part.unflatten(-1, (heads, width // heads)).transpose(1, 2)
                for part in self.project(self.norms[0](x)).split(width, -1)
            ]
            y = functional.scaled_dot_product_attention(*heads_of, is_causal=True)
            x = x + self.output(y.transpose(1, 2).flatten(-2))
            return x + self.down(functional.gelu(self.up(self.norms[1](x))))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(PEER["vocabulary"], width)
            self.positions = nn.Embedding(length, width)
            self.blocks = nn.Sequential(*(Block() for _ in range(PEER["layers"])))
            self.norm = nn.LayerNorm(width, bias=False)

        def forward(self, ids):
            x = self.tokens(ids) + self.positions(torch.arange(length))
            return self.norm(self.blocks(x)) @ self.tokens.weight.T

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    tokens = torch.randint(0, PEER["vocabulary"], (batch, length + 1))

    def step():
        logits = model(tokens[:, :-1])
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach().numpy()

    return step, sum(x.numel() for x in model.parameters())


def main(options: Options) -> int:
    console = Console()
    config = load_config(options.config)
    ours = TrainingStep(config, PEER["vocabulary"])
    theirs, parameters = peer(config.data.batch_size, config.data.sequence_length)
    seconds = interleaved_medians({"ours": ours, "peer": theirs}, options.repeats)
    record = {
        "environment": environment() | {"torch": version("torch")},
        "config": options.config.stem,
        "peer": PEER,
        "parameters": {"ours": ours.parameters, "peer": parameters},
        "seconds": seconds,
        "ours_over_peer": seconds["ours"] / seconds["peer"],
        "profile": profile(ours),
    }
    record["requirement"] = record["ours_over_peer"] <= 1
    table = Table("", "ms a step", "parameters")
    for name in seconds:
        table.add_row(name, f"{1e3 * seconds[name]:.2f}", f"{record['parameters'][name]:,}")
    console.print(table)
    for part, time in record["profile"].items():
        console.print(f"{part:15s} {100 * time:.0f}%")
    options.output.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
