"""Loading of experiments, from Python files and from the folders of runs."""

import dataclasses
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TypeVar

import pydantic

from heinsen_jax.data import DataConfig
from heinsen_jax.data.config import MODEL
from heinsen_jax.data.tokenizer_protocol import TOKENIZER_FILE, has_name
from heinsen_jax.errors import UserError, check_regular, explain, parse_json
from heinsen_jax.models.pattern import with_layers
from heinsen_jax.runs.record import CONFIG_FILE
from heinsen_jax.runs.weights import has_weights
from heinsen_jax.training.config import ExperimentConfig, as_json, flat

PACKAGE = Path(__file__).resolve().parents[1]
CONFIGS = (PACKAGE if (PACKAGE / "configs").is_dir() else PACKAGE.parent) / "configs"
"""The shipped configurations: inside an installed package, beside it in a clone."""

Kind = TypeVar("Kind")


def load_config(path: str | Path) -> ExperimentConfig:
    """Load an experiment from a Python file with `get_config()`, or from a run's config.json.

    A path of a tokenizer in a run's config.json is replaced by the run's saved tokenizer. In an
    imported model's, `training.start` is its folder.

    Args:
      path: path of the file, or name of a shipped configuration.

    Raises:
      UserError: the file does not exist, or a field is misspelled or has an invalid value.

    Examples:
      >>> load_config("quickstart").model.num_layers
      4
    """
    path = find_file(path, CONFIGS)
    if path.suffix != ".json":
        return run_file(path, "get_config", ExperimentConfig)
    try:
        values = parse_json(path.read_bytes())
        if isinstance(values, dict) and isinstance(values.get("model"), dict):
            values["model"] = with_layers(values["model"])
        config = pydantic.TypeAdapter(ExperimentConfig).validate_python(values)
    except ValueError as error:
        raise UserError(f"{path}: {explain(error)}") from error
    return _with_own_weights(_with_own_tokenizer(check_range(config), path), path)


def _with_own_tokenizer(config: ExperimentConfig, path: Path) -> ExperimentConfig:
    """Use the run's saved tokenizer, if any; the original path may be gone."""
    data, folder = config.data, path.absolute().parent
    has_saved_tokenizer = path.name == CONFIG_FILE and (folder / TOKENIZER_FILE).exists()
    if not has_saved_tokenizer or not isinstance(data, DataConfig) or has_name(data.tokenizer):
        return config
    return dataclasses.replace(config, data=dataclasses.replace(data, tokenizer=str(folder)))


def _with_own_weights(config: ExperimentConfig, path: Path) -> ExperimentConfig:
    """Begin with the weights in the folder of an imported model."""
    data, folder = config.data, path.absolute().parent
    is_imported = isinstance(data, DataConfig) and data.corpus.startswith(MODEL)
    if config.training.start is not None or not is_imported or not has_weights(folder):
        return config
    return dataclasses.replace(
        config, training=dataclasses.replace(config.training, start=str(folder))
    )


def find_file(path: str | Path, shipped: Path) -> Path:
    """Find a file by its path, or by its name in a shipped folder.

    Raises:
      UserError: neither exists, and the message lists the shipped names; or it is not a file.
    """
    by_name = {file.stem: file for file in sorted(shipped.glob("*.py"))}
    file = by_name.get(str(path), Path(path))
    check_regular(file)
    if not file.is_file():
        raise UserError(
            f"{path}: no such file; give an existing file or one of the names {', '.join(by_name)}"
        )
    return file


def run_file(path: Path, function: str, kind: type[Kind]) -> Kind:
    """Call a function of a Python file and check the type of its result.

    Raises:
      UserError: the file does not define the function, raises an error, or the result has another
        type.
    """
    if path.suffix != ".py":
        raise UserError(f"{path} must be a Python file, .py, that defines {function}()")
    name = f"experiment_{path.stem}_{hash(path.resolve()) & 0xFFFFFFFF:x}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where dataclasses look up postponed annotations
    try:
        spec.loader.exec_module(module)
        if not hasattr(module, function):
            raise UserError(f"{path} defines no {function}()")
        returned = getattr(module, function)()
    except Exception as error:
        del sys.modules[name]
        if isinstance(error, UserError):
            raise
        if isinstance(error, ValueError):
            raise UserError(f"{path}: {explain(error)}") from error
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path)]
        if isinstance(error, SyntaxError) and error.filename == str(path):
            lines.append(error.lineno)
        where = f"{path}, line {lines[-1]}" if lines else str(path)
        raise UserError(f"{where}: {type(error).__name__}: {explain(error)}") from error
    if not isinstance(returned, kind):
        raise UserError(
            f"{path}: {function}() must return {kind.__name__}, not {type(returned).__name__}"
        )
    return returned


def check_range(config: ExperimentConfig) -> ExperimentConfig:
    """Return the configuration if JAX and NumPy can represent its integers.

    Raises:
      UserError: an integer is out of range.
    """
    for name, value in flat(as_json(config)).items():
        limit = 2**32 if name == "seed" else 2**31
        if isinstance(value, int) and abs(value) >= limit:
            raise UserError(f"{name}={value} is out of range; give an integer below {limit:,}")
    return config
