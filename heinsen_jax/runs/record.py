"""Names and content of the files in a run's folder that other parts of the package read."""

import shlex
from pathlib import Path
from typing import Any, TypeAlias

from heinsen_jax.errors import UserError, parse_json
from heinsen_jax.models.pattern import with_layers

CONFIG_FILE = "config.json"
"""The resolved configuration of a run."""
SAVED_FILE = "last_checkpoint.json"
"""Records the newest step that was saved, 0 before the first, so that lost checkpoints are
noticed."""
LOSSES_FILE = "losses_since.json"
"""Records the last step before the data or their evaluation changed: earlier losses cannot be
compared with later ones."""
DATA_FILE = "data_manifest.json"
"""Manifest of the prepared data of a run."""

Sections: TypeAlias = dict[str, Any]
"""Content of `config.json`: the seed, and the fields of each section of an `ExperimentConfig`."""


def read_config(workdir: Path) -> Sections | None:
    """Read the resolved configuration of a run; None if the folder has no run.

    Raises:
      UserError: the file is damaged.
    """
    path = workdir / CONFIG_FILE
    if not path.exists():
        return None
    try:
        config = parse_json(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable") from None
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); restore it or use another workdir") from None
    if isinstance(config, dict) and "model_type" in config:
        command = shlex.join(("import", str(workdir), "--workdir", "DIR"))
        raise UserError(
            f"{workdir} is a checkpoint of transformers, not a run; import it with "
            f"`python -m heinsen_jax.interop.transformers {command}`"
        )
    for name in ("model", "data", "optimizer"):
        if not isinstance(config, dict) or not isinstance(config.get(name), dict):
            raise UserError(f"{path} is damaged (no {name}); restore it or use another workdir")
    try:
        config["model"] = with_layers(config["model"])
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    return config


def newest_saved(path: Path) -> int | None:
    """The step that `Checkpoints.record_newest` recorded: 0 before the first one, -1 if the record
    is damaged, None without a record."""
    try:
        return int(parse_json(path.read_bytes())["step"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return -1
