"""Lost and damaged files are refused or named, never ignored."""

import json
import shutil
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import SafetensorError

from heinsen_jax import evaluate
from heinsen_jax.config import load_config
from heinsen_jax.data import DataConfig, load, units
from heinsen_jax.errors import UserError, command_line
from heinsen_jax.generate import load_state, save_state
from heinsen_jax.generate.__main__ import main as generate
from heinsen_jax.interop.hub import from_pretrained, save_pretrained
from heinsen_jax.runs import checksums, weights
from heinsen_jax.runs.checkpoints import CheckpointReader
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.runs.weights import load_hashed, save_hashed
from heinsen_jax.runtime import distributed
from heinsen_jax.train import main
from heinsen_jax.training import loop, prepare_run
from heinsen_jax.training.checkpoint import Checkpoints
from tests.faults.conftest import assert_one_line, said


def flip(path, place=None, bit=1) -> None:
    """Flip one bit of a file, in the middle by default."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if place is None else place] ^= bit
    path.write_bytes(content)


def damage_all(run) -> None:
    for step in (run / "checkpoints").iterdir():
        flip(step / "default/manifest.ocdbt")


def remove_folder(run) -> None:
    shutil.rmtree(run / "checkpoints")


def remove_folder_and_record(run) -> None:
    remove_folder(run)
    (run / "last_checkpoint.json").unlink()


def empty_folder(run) -> None:
    for step in (run / "checkpoints").iterdir():
        shutil.rmtree(step) if step.is_dir() else step.unlink()


@pytest.mark.parametrize(
    ("way", "words"),
    [
        pytest.param(damage_all, "is damaged: step", marks=pytest.mark.nightly),
        (remove_folder, "is gone"),
        (empty_folder, "is gone"),
        (remove_folder_and_record, "is gone"),  # metrics.jsonl shows that the run has trained
    ],
)
def test_a_run_without_its_checkpoints_is_not_restarted(
    place, run, way, words, monkeypatch, capsys
):
    monkeypatch.chdir(place)
    way(run)
    before = (run / "metrics.jsonl").read_bytes()
    for _ in range(2):  # also when damaged steps have been renamed
        code, err = said(main, monkeypatch, capsys, "--config", "tiny.py", "--workdir", str(run))
        assert code == 2
        assert f"{run}/checkpoints: every checkpoint of this run is" in err
        assert "--restart" in err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_damage_is_named(place, run, monkeypatch, capsys):
    damage_all(run)
    with pytest.raises(UserError, match=r"step 40 \(default/manifest.ocdbt is not as") as refused:
        load_run(run)
    assert "--restart" not in str(refused.value), "only training has that option"
    monkeypatch.chdir(place)
    _, err = said(main, monkeypatch, capsys, "--config", "tiny.py", "--workdir", str(run))
    assert "step 35 (default/manifest.ocdbt is not as it was written), step 40 (" in err


def test_restart_sets_the_run_aside(place, run, monkeypatch, capsys):
    monkeypatch.chdir(place)
    damage_all(run)
    before = (run / "metrics.jsonl").read_bytes()
    wider = "--model.model_dim", "24"
    arguments = "--workdir", str(run), "--restart", *wider, "--training.steps", "20"
    assert said(main, monkeypatch, capsys, "--config", "tiny.py", *arguments) == (0, "")
    assert (run / "before-restart/metrics.jsonl").read_bytes() == before
    assert next(iter(read_metrics(run)))["step"] == 1
    assert load_run(run)[2] == 20


def test_a_run_without_a_checkpoint_yet_starts_again(place, run, monkeypatch, capsys):
    """The run was killed before its first checkpoint, with rows in metrics.jsonl."""
    remove_folder(run)
    (run / "last_checkpoint.json").write_text('{"step": 0}')
    monkeypatch.chdir(place)
    few = "--workdir", str(run), "--training.steps", "20"
    assert said(main, monkeypatch, capsys, "--config", "tiny.py", *few) == (0, "")


@pytest.mark.parametrize("option", [("name", "muon"), ("ema_decay", "0.5")])
def test_an_optimizer_whose_arrays_checkpoints_lack_is_refused(
    option, place, run, monkeypatch, capsys
):
    monkeypatch.chdir(place)
    changed = f"--optimizer.{option[0]}", option[1], "--training.steps", "41"
    arguments = "--config", "tiny.py", "--workdir", str(run), *changed
    code, line = said(main, monkeypatch, capsys, *arguments)
    assert code == 2
    assert "--allow-change to resume with the new ones, if its checkpoints have the arrays" in line
    code, line = said(main, monkeypatch, capsys, *arguments, "--allow-change")
    assert code == 2
    assert "saved with another optimizer.name, optimizer.ema_decay or distillation.trained" in line
    assert "or begin in another folder with this run as training.start" in line


def test_changed_settings_are_refused_unless_allowed(place, run, monkeypatch, capsys):
    monkeypatch.chdir(place)
    monkeypatch.setattr(distributed, "initialize", lambda *_, **__: None)
    more = "--workdir", str(run), "--training.steps", "20", "--optimizer.learning_rate", "0.02"
    before = (run / "config.json").read_bytes()
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny.py", *more])
    assert main() == 2
    said = capsys.readouterr().err
    assert "other settings: optimizer.learning_rate 0.02 (was 0.01); restore" in said
    assert "give --allow-change to resume" in said
    assert (run / "config.json").read_bytes() == before
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny.py", *more, "--allow-change"])
    assert main() == 0
    said = capsys.readouterr().out
    changed = "optimizer.learning_rate 0.02 (was 0.01); training.steps 20 (was 40)"
    assert f"changed since the last start: {changed}\n" in said
    assert "has made 40 updates, and training.steps=20: nothing is left to train" in said
    assert "compiling" not in said
    assert (run / "config.json").read_bytes() == (place / "finished/config.json").read_bytes()


def test_a_finished_run_has_the_metrics_of_its_last_evaluation(place, run, monkeypatch):
    monkeypatch.chdir(place)
    config = load_config(run / "config.json")
    dataset = load(config.data)
    recorded = next(x for x in reversed(read_metrics(run)) if "validation/loss" in x)
    result = loop.train(prepare_run(config, run, dataset=dataset))
    assert {f"validation/{name}": x for name, x in result.metrics.items()} == {
        name: x for name, x in recorded.items() if name != "step"
    }
    for name in ("metrics.jsonl", "loss.png"):  # killed right after its last checkpoint
        (run / name).unlink()
    evaluated = loop.train(prepare_run(config, run, dataset=dataset))
    assert evaluated.metrics == pytest.approx(result.metrics, rel=1e-5)
    assert (run / "loss.png").exists()
    assert read_metrics(run)[-1] == pytest.approx(recorded, rel=1e-5)


def test_a_resumed_run_refuses_changed_text(place, run, monkeypatch, capsys):
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(distributed, "initialize", lambda *_, **__: None)
    words = (place / "words.txt").read_text()
    for text, says in ((words, False), (words.replace("a", "d"), True)):
        (run.parent / "words.txt").write_text(text)
        more = "--workdir", str(run), "--training.steps", "40"
        monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(place / "tiny.py"), *more])
        assert main() == (2 if says else 0)
        assert ("other settings: the content of data.corpus" in capsys.readouterr().err) is says


def test_a_newest_checkpoint_that_is_gone_is_named(place, run, monkeypatch, capsys):
    shutil.rmtree(run / "checkpoints/40")
    with pytest.warns(match=r"checkpoints/40 was saved, and is gone: step 35 is used"):
        assert load_run(run, best=False)[2] == 35
    monkeypatch.chdir(place)
    monkeypatch.setattr(distributed, "initialize", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "tiny.py", "--workdir", str(run)])
    assert main() == 0
    assert "checkpoints/40 was saved, and is gone: step 35 is used" in capsys.readouterr().out
    assert load_run(run, best=False)[2] == 40


def test_files_that_vanish_while_they_are_read_are_missing(run, monkeypatch):
    hashes = checksums._hashes
    monkeypatch.setattr(
        checksums, "_hashes", lambda folder, *more: (shutil.rmtree(folder), hashes(folder, *more))
    )
    assert "is missing" in str(checksums.find_damage(run / "checkpoints/35"))
    assert "is missing" in str(checksums.find_damaged_array(run / "checkpoints/40"))


def test_a_checkpoint_that_was_saved_since_is_not_gone(run):
    (run / "checkpoints/40").rename(run / "40")
    checkpoints = CheckpointReader(run)
    (run / "40").rename(run / "checkpoints/40")
    assert checkpoints.latest_step() == 35
    assert checkpoints.warnings() == []


def test_a_checkpoint_that_its_owner_removes_is_not_damaged(run):
    """Retention removes old steps file by file, even during reads."""
    (run / "checkpoints/35/default/manifest.ocdbt").unlink()
    remover = threading.Timer(0.3, shutil.rmtree, (run / "checkpoints/35",))
    remover.start()
    checkpoints = CheckpointReader(run)
    remover.join()
    next((run / "checkpoints/40/default/d").iterdir()).unlink()
    remover = threading.Timer(0.3, shutil.rmtree, (run / "checkpoints/40",))
    remover.start()
    assert checkpoints.latest_step() is None
    assert checkpoints.damaged == {}
    remover.join()


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("Failed to write 9 bytes: File too large [os_error_code='27']"), UserError),
        (ValueError("PERMISSION_DENIED: HTTP response code: 403"), UserError),
        (KeyError("a fault of ours"), KeyError),
    ],
)
def test_only_storage_errors_are_reported_as_such(run, monkeypatch, error, raised):
    def fail() -> None:
        raise error

    with Checkpoints(run) as checkpoints, monkeypatch.context() as patch:
        patch.setattr(checkpoints._manager, "wait_until_finished", fail)
        with pytest.raises(raised):
            checkpoints.wait()


def test_a_device_that_is_out_of_memory_is_one_line(capsys):
    @command_line
    def main() -> None:
        jax.block_until_ready(jnp.zeros(1 << 46))  # 256 TiB

    assert main() == 2
    assert_one_line(capsys.readouterr().err, "out of memory (RESOURCE_EXHAUSTED", "shorter")


@pytest.mark.nightly
def test_readers_name_the_step_that_replaces_a_damaged_one(run, monkeypatch, capsys):
    flip(run / "checkpoints/40/default/manifest.ocdbt")
    with pytest.warns(match=r"checkpoints/40 is damaged \(.*\): step \d+ is used"):
        assert load_run(run, best=False)[2] == 35
    for program, more in (
        (generate, ("--prompt", "abc", "--max-new-tokens", "1")),
        (evaluate.main, ("--max-batches", "1", "--data", str(run.parent / "words.txt"))),
    ):
        (run.parent / "words.txt").write_text("abc de f " * 100)
        monkeypatch.chdir(run.parent)
        code, err = said(program, monkeypatch, capsys, "--workdir", str(run), "--latest", *more)
        assert code == 0
        assert "checkpoints/40 is damaged (default/manifest.ocdbt is not as it was" in err
        assert "): step 35 is used\n" in err


def spread(size: int, number: int) -> list[int]:
    """Return positions all over a file."""
    return np.linspace(0, size - 1, number).astype(int).tolist()


def test_any_flipped_bit_of_saved_weights_is_detected(run, tmp_path):
    folder = save_pretrained(run, tmp_path / "model")
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for number, place in enumerate(spread(len(whole), 40)):
        flip(path, place, 1 << number % 8)
        with pytest.raises(UserError, match="model"):
            from_pretrained(folder)
        path.write_bytes(whole)
    from_pretrained(folder)


def test_any_flipped_bit_of_a_saved_state_is_detected(run, tmp_path):
    model, _, _ = load_run(run)
    path = tmp_path / "state"
    save_state(path, model, model.init_state(()))
    whole = path.read_bytes()
    for number, place in enumerate(spread(len(whole), 64)):
        flip(path, place, 1 << number % 8)
        with pytest.raises(UserError, match="state"):
            load_state(path, model)
        path.write_bytes(whole)
    load_state(path, model)


def test_shards_are_verified_on_request(place, tmp_path):
    shutil.copytree(place / "data", tmp_path / "data")
    (prepared,) = (x for x in (tmp_path / "data").iterdir() if (x / "manifest.json").exists())
    config = DataConfig(corpus=str(prepared), verify=True)
    load(config)
    flip(prepared / "train-00000.bin")
    load(DataConfig(corpus=str(prepared)))
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged .* prepare it again"):
        load(config)


def test_write_errors_are_detected_by_preparation(tmp_path, monkeypatch):
    class Losing(units._ShardWriter):
        def shard(self):
            self._file.seek(0)
            self._file.write(b"x")
            return super().shard()

    monkeypatch.setattr(units, "_ShardWriter", Losing)
    (tmp_path / "a.txt").write_text("words " * 100)
    with pytest.raises(UserError, match=r"train-00000\.bin is damaged"):
        load(DataConfig(corpus=str(tmp_path / "a.txt"), cache=str(tmp_path / "data")))


def drop(name):
    return lambda file: file.pop(name)


CONFIGS = {
    "no model": drop("model"),
    "an unknown field": lambda config: config["model"].update(width=3),
    "a wrong value": lambda config: config["model"].update(num_heads="many"),
    "a list": lambda config: config.update(data=[]),
}


@pytest.mark.parametrize("change", CONFIGS.values(), ids=CONFIGS)
def test_a_wrong_configuration_is_one_line(run, change, monkeypatch, capsys):
    config = json.loads((run / "config.json").read_text())
    change(config)
    (run / "config.json").write_text(json.dumps(config))
    code, err = said(generate, monkeypatch, capsys, "--workdir", str(run), "--prompt", "a")
    assert code == 2
    assert err.startswith(f"error: {run}/config.json")
    assert err.count("\n") == 1


def rewritten(path, change) -> None:
    """Rewrite a saved file with other metadata and a matching hash: invalid, but not damaged."""
    arrays, metadata = load_hashed(path, "")
    change(metadata)
    save_hashed(path, arrays, metadata)


def contents(**changes):
    """Change what a state's file says of it."""

    def change_metadata(metadata):
        metadata["contents"] = json.dumps(json.loads(metadata["contents"]) | changes)

    return change_metadata


STATES = {
    "no contents": drop("contents"),
    "no JSON": lambda metadata: metadata.update(contents="{"),
    "a list": lambda metadata: metadata.update(contents="[]"),
    "an unknown field": contents(shapes={}),
    "another batch": contents(batch_shape=[2]),
    "too large": contents(batch_shape=[10**12]),
    "negative": contents(batch_shape=[-1]),
    "no numbers": contents(batch_shape=["a"]),
    "caches of a model without": contents(by_row=True),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_a_malformed_state_is_one_error(run, tmp_path, change):
    model, _, _ = load_run(run)
    save_state(tmp_path / "state", model, model.init_state(()))
    rewritten(tmp_path / "state", change)
    with pytest.raises(UserError, match="state is not a valid state"):
        load_state(tmp_path / "state", model)


def test_the_arrays_of_a_state_have_the_shapes_of_its_model(run, tmp_path):
    model, _, _ = load_run(run)
    save_state(tmp_path / "state", model, model.init_state(()))
    arrays, metadata = load_hashed(tmp_path / "state", "")
    name, x = next((name, x) for name, x in arrays.items() if x.ndim > 1)
    for other in (np.concatenate([x, x], -1), x[:-1], x[None], x.astype("f2"), x.ravel()):
        save_hashed(tmp_path / "other", arrays | {name: other}, metadata)
        with pytest.raises(UserError, match="other is not a valid state"):
            load_state(tmp_path / "other", model)
    fewer = {other: x for other, x in arrays.items() if other != name}
    for changed in (fewer, arrays | {"more": x}):
        save_hashed(tmp_path / "other", changed, metadata)
        with pytest.raises(UserError, match="other is not a valid state"):
            load_state(tmp_path / "other", model)


def test_a_failed_write_keeps_the_previous_state(run, tmp_path, monkeypatch):
    model, _, _ = load_run(run)
    path = tmp_path / "state"
    save_state(path, model, model.init_state(()))
    before = path.read_bytes()
    (tmp_path / "plain").touch()
    assert path.stat().st_mode == (tmp_path / "plain").stat().st_mode

    def fail(held: object, partial: str, metadata: object) -> None:
        Path(partial).write_bytes(b"half")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(weights, "save_file", fail)
    with pytest.raises(UserError, match="state cannot be written"):
        save_state(path, model, model.init_state(()))
    assert path.read_bytes() == before
    assert sorted(x.name for x in tmp_path.iterdir()) == ["plain", "run", "state"]


def test_an_invalid_step_is_one_error(run, tmp_path):
    folder = save_pretrained(run, tmp_path / "model")
    rewritten(folder / "model.safetensors", lambda metadata: metadata.update(step="last"))
    with pytest.raises(UserError, match="its step 'last' is not an integer"):
        from_pretrained(folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.json"])
def test_a_file_that_cannot_be_written_is_one_line(place, run, name, monkeypatch, capsys):
    (run / name).unlink()
    (run / name).mkdir()  # since root may write to read-only files
    monkeypatch.chdir(place)
    more = "--workdir", str(run), "--training.steps", "50"
    code, err = said(main, monkeypatch, capsys, "--config", "tiny.py", *more)
    assert code == 2
    assert err.startswith("error: ")
    assert name in err
    assert err.count("\n") == 1
