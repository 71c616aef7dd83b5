"""Attributes of the package, imported on first use."""

import subprocess
import sys

import pytest

import heinsen_jax
from heinsen_jax import attention, data, training
from heinsen_jax.data import pipeline
from heinsen_jax.training import loop, prepare


def test_names_of_attention_are_attributes():
    assert heinsen_jax.log_attention is attention.log_attention
    assert heinsen_jax.attention is attention
    assert heinsen_jax.heinsen_attention is attention.heinsen_attention
    assert {"log_attention_fn", "models", "__version__"} <= set(dir(heinsen_jax))
    with pytest.raises(AttributeError, match="no attribute 'log_atention'"):
        _ = heinsen_jax.log_atention


def test_names_of_data_are_attributes():
    assert data.load is pipeline.load
    with pytest.raises(AttributeError, match=r"heinsen_jax\.data' has no attribute 'laod'"):
        _ = data.laod


def test_names_of_training_are_attributes():
    assert (training.train, training.resolve_settings) == (loop.train, prepare.resolve_settings)
    with pytest.raises(AttributeError, match=r"heinsen_jax\.training' has no attribute 'tarin'"):
        _ = training.tarin


def test_subpackages_are_imported_on_first_use():
    program = "import heinsen_jax; print(heinsen_jax.attention.build, heinsen_jax.log_attention)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_a_configuration_is_loaded_without_the_trainer():
    program = """if True:
        import sys
        from heinsen_jax import config, linearize
        config.override(config.load_config("quickstart"), ["--training.steps", "3"])
        slow = "matplotlib", "tensorboardX", "orbax.checkpoint", "grain", "scipy", "wandb"
        sys.exit(", ".join(name for name in slow if name in sys.modules) or 0)
    """
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_import_alone_loads_no_jax():
    """Nor does importing a submodule that needs none."""
    program = "from heinsen_jax.storage import locks; import sys; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
