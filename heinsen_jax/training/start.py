"""Training from the weights of another run or model."""

from collections.abc import Mapping

import numpy as np

from heinsen_jax.attention.parameters import LORA
from heinsen_jax.errors import UserError
from heinsen_jax.models import LanguageModelConfig
from heinsen_jax.models.conversion import new_parameters, shared_weights
from heinsen_jax.runs.load import load_architecture, load_run


def check_start(model: LanguageModelConfig, start: str, field: str = "training.start") -> None:
    """Check that a run can begin with the weights in the folder `start`, which a field names.

    Raises:
      UserError: the folder has no model, or one of other sizes; or only low-rank additions are
        trained, and it lacks other parameters.
    """
    try:
        theirs = load_architecture(start)
    except UserError as error:
        raise UserError(f"{field}={start}: {error}") from None
    lacking = sorted(name for name in new_parameters(model, theirs) if LORA not in name)
    if model.lora_rank is not None and lacking:
        raise UserError(
            f"model.lora_rank={model.lora_rank} trains additions alone, but training.start={start} "
            f"lacks {lacking[0].removesuffix('.value')}; leave one of them out"
        )


def start_weights(model: LanguageModelConfig, start: str) -> Mapping[str, np.ndarray]:
    """The weights of a model in the folder `start`, by name."""
    return shared_weights(model, load_run(start, on_host=True)[0])
