"""Experiments: loaded from files, overridden from the command line."""

from heinsen_jax.config.load import CONFIGS, find_file, load_config, run_file
from heinsen_jax.config.override import override
from heinsen_jax.data.config import DataConfig
from heinsen_jax.models.config import LanguageModelConfig
from heinsen_jax.models.pattern import Layers
from heinsen_jax.sharding import MeshConfig
from heinsen_jax.training.config import (
    DistillationConfig,
    ExperimentConfig,
    OptimizerConfig,
    TrainingConfig,
    as_json,
)

__all__ = [
    "CONFIGS",
    "DataConfig",
    "DistillationConfig",
    "ExperimentConfig",
    "LanguageModelConfig",
    "Layers",
    "MeshConfig",
    "OptimizerConfig",
    "TrainingConfig",
    "as_json",
    "find_file",
    "load_config",
    "override",
    "run_file",
]
