"""Checkpoints: what is kept, what comes back, and what a damaged one says."""

import jax.numpy as jnp
import numpy as np
import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.training.checkpoint import Checkpoints, load_run
from heinsen_jax.training.state import TrainState


def state(value: float) -> TrainState:
    return TrainState(jnp.array(1), {"w": jnp.full((4, 3), value)}, (jnp.full(3, -value),))


def test_what_is_saved_comes_back_bit_for_bit(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    saved = TrainState(
        jnp.array(7), {"w": jnp.array([1.1, jnp.nan, -0.0, 1e-45, jnp.inf])}, (jnp.ones(2),)
    )
    checkpoints.save(7, saved)
    checkpoints.close()
    restored = Checkpoints(tmp_path).restore(7, saved)
    assert restored.parameters["w"].tobytes() == saved.parameters["w"].tobytes()
    assert int(restored.step) == 7
    np.testing.assert_array_equal(restored.optimizer[0], saved.optimizer[0])


def test_the_latest_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, 2.5)):
        checkpoints.save(step, state(step), loss=loss)
    checkpoints.close()
    reopened = Checkpoints(tmp_path)
    assert sorted(p.name for p in reopened.folder.iterdir() if p.is_dir()) == ["2", "4", "5"]
    assert (reopened.latest_step(), reopened.best_step()) == (5, 2)


def test_a_part_of_the_state_can_be_restored(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(2.0))
    part = {"parameters": {"w": jnp.zeros((4, 3))}}
    np.testing.assert_array_equal(
        checkpoints.restore(1, part)["parameters"]["w"], jnp.full((4, 3), 2.0)
    )
    checkpoints.close()


def test_a_step_half_written_is_not_the_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    checkpoints.close()
    (checkpoints.folder / "2.orbax-checkpoint-tmp").mkdir()
    assert Checkpoints(tmp_path).latest_step() == 1


def test_a_damaged_step_is_named(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, state(1.0))
    checkpoints.close()
    for file in (checkpoints.folder / "1").rglob("*"):
        if file.is_file() and file.parent.name == "d":
            file.write_bytes(file.read_bytes()[:10])
    with pytest.raises(UserError, match=r"checkpoints/1 cannot be read \(.+\): delete"):
        Checkpoints(tmp_path).restore(1, state(0.0))


def test_a_folder_without_a_run_says_how_to_make_one(tmp_path):
    with pytest.raises(UserError, match=r"holds no run .* train one with"):
        load_run(tmp_path)
