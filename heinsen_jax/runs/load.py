"""Loading the model of a run: architecture, weights and tokenizer."""

import dataclasses
import shlex
import warnings
from pathlib import Path

import jax
import pydantic
from flax import nnx

from heinsen_jax import data
from heinsen_jax.data import Tokenizer
from heinsen_jax.errors import UserError, explain, extra_module
from heinsen_jax.models import LanguageModel, LanguageModelConfig
from heinsen_jax.models.config import Dtype
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.folder import RunFolder, open_run
from heinsen_jax.runs.record import CONFIG_FILE, SAVED_FILE, Sections, newest_saved, read_config
from heinsen_jax.runs.weights import has_weights, load_weights
from heinsen_jax.typing import config_dataclass


@config_dataclass
class ModelOptions:
    """Options of commands that load a model."""

    workdir: str
    """A run's folder, or a model folder in the format of the Hugging Face Hub."""
    latest: bool = False
    """Use the latest checkpoint, not the best."""


@config_dataclass
class Precision:
    """Dtypes of a loaded model, in place of the saved ones."""

    dtype: Dtype | None = None
    """Dtype of activations in matrix products; as saved when None."""
    param_dtype: Dtype | None = None
    """Dtype of parameters except for vectors; as saved when None."""

    def of(self, model: LanguageModelConfig) -> LanguageModelConfig:
        """The architecture with these dtypes."""
        given = {name: dtype for name, dtype in vars(self).items() if dtype is not None}
        return dataclasses.replace(model, **given)


AS_SAVED = Precision()


@config_dataclass
class InferenceOptions(ModelOptions):
    """Options of commands that compute with a model."""

    model: Precision = AS_SAVED


def load_run(
    workdir: str | Path,
    *,
    best: bool = True,
    on_host: bool = False,
    precision: Precision = AS_SAVED,
) -> tuple[LanguageModel, Tokenizer | None, int]:
    """Load a run's best (or latest) checkpoint, or a model folder of `interop.hub`.

    Args:
      workdir: the folder.
      best: whether to load the checkpoint with the smallest validation loss, not the latest.
      on_host: whether the parameters are NumPy arrays in the memory of this host, instead of arrays
        on its first device.
      precision: dtypes in place of the saved ones.

    Returns:
      The model, the tokenizer, which is None if the run trained on a task, and the step.

    Raises:
      UserError: the folder has no run, or the run is damaged or has no checkpoints.

    Warns:
      UserWarning: a checkpoint is damaged or missing, and another one is used.

    Examples:
      Continue a prompt with a trained model:

          model, tokenizer, step = load_run("runs/quickstart")
          complete(model, tokenizer, ["def "], 100, key=jax.random.key(0))
    """
    with open_run(workdir) as run:
        model, step, config = _loaded(run, best, on_host, precision)
        is_task = "task" in config["data"]
        return model, None if is_task else data.load_tokenizer(run.files), step


def load_model(
    workdir: str | Path, *, best: bool = True, on_host: bool = False
) -> tuple[LanguageModel, int]:
    """`load_run` without the tokenizer. Loading a model folder needs no extra; a run's checkpoint
    needs the extra `train`.

    Raises:
      UserError: as `load_run`.
    """
    with open_run(workdir) as run:
        return _loaded(run, best, on_host, AS_SAVED)[:2]


def load_architecture(workdir: str | Path) -> LanguageModelConfig:
    """The architecture of the model of `load_run`, without its weights.

    Raises:
      UserError: as `load_run`, except for damaged checkpoints.
    """
    with open_run(workdir) as run:
        return _architecture(run)[0]


def _architecture(run: RunFolder) -> tuple[LanguageModelConfig, Sections]:
    """The architecture of a run's model, and the whole configuration."""
    config = read_config(run.files)
    if config is None:
        raise UserError(_no_run(run))
    if not run.checkpoints.is_dir() and not has_weights(run.files):
        raise UserError(_no_checkpoint(run))
    try:
        return pydantic.TypeAdapter(LanguageModelConfig).validate_python(config["model"]), config
    except ValueError as error:
        raise UserError(f"{run.files / CONFIG_FILE}: model.{explain(error)}") from None


def _loaded(
    run: RunFolder, best: bool, on_host: bool, precision: Precision
) -> tuple[LanguageModel, int, Sections]:
    """The model, its step, and the whole configuration."""
    workdir = run.files
    model, config = _architecture(run)
    abstract = nnx.state(LanguageModel.abstract(model))
    graph, wanted = nnx.split(LanguageModel.abstract(precision.of(model)))
    device = None if on_host else jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device), abstract
    )
    if run.checkpoints.is_dir():
        parameters, step = _load_checkpoint(run, abstract, best)
    else:
        arrays, step = load_weights(workdir, flatten_with_names(abstract))
        leaves = [arrays[name] for name in flatten_with_names(abstract)]
        parameters = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    parameters = jax.tree.map(lambda x, y: x.astype(y.dtype, copy=False), parameters, wanted)
    return nnx.merge(graph, parameters), step, config


def load_text_run(
    workdir: str | Path,
    *,
    best: bool = True,
    on_host: bool = False,
    precision: Precision = AS_SAVED,
) -> tuple[LanguageModel, Tokenizer, int]:
    """`load_run` for a model of text.

    Raises:
      UserError: as `load_run`; or the model is trained on a synthetic task.
    """
    model, tokenizer, step = load_run(workdir, best=best, on_host=on_host, precision=precision)
    if tokenizer is None:
        raise UserError(
            f"{workdir}: the model is trained on a synthetic task; choose a run trained on text"
        )
    return model, tokenizer, step


def _load_checkpoint(run: RunFolder, abstract: nnx.State, best: bool) -> tuple[nnx.State, int]:
    """Load the weights of a run's best (or latest) checkpoint, and its step: the average of the
    parameters, if the checkpoint has one, as `TrainState.weights`."""
    checkpoints = extra_module("heinsen_jax.runs.checkpoints").CheckpointReader(run)
    step = checkpoints.best_step() if best else checkpoints.latest_step()
    checkpoints.check_lost("bring one back, or train it again")
    if step is None:
        raise UserError(_no_checkpoint(run))
    for warning in checkpoints.warnings():
        warnings.warn(f"{warning}: step {step} is used", stacklevel=3)
    has_average = any(name.startswith("average.") for name in checkpoints.names(step))
    name = "average" if has_average else "parameters"
    return checkpoints.restore(step, {name: abstract})[name], step


def _no_run(run: RunFolder) -> str:
    """Error message for a path without a run."""
    workdir, message = run.files, f"{run} holds no run ({CONFIG_FILE} is missing)"
    if workdir.is_file():
        return f"{workdir} is a file; give the folder of a run"
    if runs := sorted(path.parent.name for path in workdir.glob(f"*/{CONFIG_FILE}")):
        return f"{message}; give one of the folders in it that do: {', '.join(runs)}"
    command = shlex.join(("--config", "quickstart", "--workdir", str(run)))
    return (
        f"{message}; train one with `python -m heinsen_jax.train {command}`, or import a model of "
        "transformers with `python -m heinsen_jax.interop.transformers import owner/name "
        "--workdir DIR`"
    )


def _no_checkpoint(run: RunFolder) -> str:
    if newest_saved(run.files / SAVED_FILE):
        return f"{run.checkpoints} is gone; bring it back, or train the run again"
    return f"{run} has no checkpoint yet; start its training again"
