"""Training: `train(prepare_run(config, workdir))`.

Names are imported at first use: configurations should not wait for the trainer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heinsen_jax.training.config import ExperimentConfig
    from heinsen_jax.training.loop import Diverged, TrainingResult, train
    from heinsen_jax.training.prepare import Prepared, Settings, prepare_run, resolve_settings

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


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = (importlib.import_module(f"{__name__}.{x}") for x in ("config", "prepare", "loop"))
    return next(getattr(module, name) for module in modules if hasattr(module, name))
