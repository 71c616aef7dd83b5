"""Training: `train(prepare_run(config, workdir))`.

Names are imported at first use: configurations should not wait for the trainer.
"""

from typing import TYPE_CHECKING

from heinsen_jax.runtime.lazy import attributes

if TYPE_CHECKING:
    from heinsen_jax.training.config import ExperimentConfig
    from heinsen_jax.training.loop import Diverged, TrainingResult, train
    from heinsen_jax.training.prepare import Prepared, prepare_run
    from heinsen_jax.training.settings import Settings, resolve_settings

__all__ = [
    "Diverged",
    "ExperimentConfig",
    "Prepared",
    "Settings",
    "TrainingResult",
    "prepare_run",
    "resolve_settings",
    "train",
]

__getattr__ = attributes(__name__, __all__, ("config", "settings", "prepare", "loop"))
