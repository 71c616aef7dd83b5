"""Help texts of configuration fields, and of mechanisms and their options."""

import dataclasses
import inspect

from heinsen_jax.attention.registry import mechanism, names
from heinsen_jax.errors import UserError
from heinsen_jax.runtime.arguments import options_of, print_fields
from heinsen_jax.training.config import ExperimentConfig

FIRST = (
    "seed",
    "model.attention",
    "model.block",
    "model.num_layers",
    "model.model_dim",
    "model.num_heads",
    "data.corpus",
    "data.tokenizer",
    "data.sequence_length",
    "data.batch_size",
    "optimizer.learning_rate",
    "optimizer.warmup_steps",
    "training.steps",
    "training.evaluate_every",
    "training.checkpoint_every",
    "mesh.data",
    "mesh.fsdp",
)
MECHANISM = "model.attention."
"""Before the name of a mechanism."""
SECTIONS = tuple(x.name for x in dataclasses.fields(ExperimentConfig) if x.name != "seed")


def print_help(config: ExperimentConfig, section: str) -> None:
    """Print the fields of a configuration with their values and descriptions.

    Args:
      config: the configuration.
      section: a section (model, data, ...), or "all"; "" for the most common fields;
        model.attention.NAME for the formula, the paper and the options of a mechanism.

    Raises:
      UserError: unknown section or mechanism.
    """
    if section.startswith(MECHANISM):
        _print_mechanism(section.removeprefix(MECHANISM))
        return
    options = options_of(ExperimentConfig, values=config)
    if section in (*SECTIONS, "all"):
        chosen = [x for x in options.values() if section in ("all", x.name.partition(".")[0])]
        print_fields(chosen)
        return
    if section:
        raise UserError(
            f"--help {section}: no such section; choose one of {', '.join(SECTIONS)}, all"
        )
    print("\nmost common fields, with their values here:\n")
    print_fields(options[name] for name in FIRST if name in options)  # a task has no corpus
    print(f"\nall fields of a section: --help SECTION, one of {', '.join(SECTIONS)}; or --help all")
    print(f"options of a mechanism: --help {MECHANISM}NAME, for example {MECHANISM}gated_deltanet")


def _print_mechanism(name: str) -> None:
    if name not in names():
        raise UserError(f"--help {MECHANISM}{name}: choose one of {', '.join(names())}")
    layer = mechanism(name)
    print(f"\n{inspect.getdoc(layer)}\n\noptions, as --model.attention {name}:OPTION=VALUE,...\n")
    print_fields(options_of(layer.Config).values(), flags=False)
