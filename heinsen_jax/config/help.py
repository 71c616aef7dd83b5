"""Help texts of configuration fields: the most common ones, or a section."""

import dataclasses

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
SECTIONS = tuple(x.name for x in dataclasses.fields(ExperimentConfig) if x.name != "seed")


def print_help(config: ExperimentConfig, section: str) -> None:
    """Print the fields of a configuration with their values and descriptions.

    Args:
      config: the configuration.
      section: a section (model, data, ...), or "all"; "" for the most common fields.

    Raises:
      UserError: unknown section.
    """
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
