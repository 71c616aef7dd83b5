"""Models in the format of the hub: equal after saving and loading; damage is detected."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from huggingface_hub import ModelCard
from huggingface_hub.errors import LocalEntryNotFoundError

from heinsen_jax.config import as_json
from heinsen_jax.errors import UserError
from heinsen_jax.interop import hub
from heinsen_jax.interop.hub import from_pretrained, push, save_pretrained
from heinsen_jax.pytrees import flatten_with_names
from heinsen_jax.runs.load import load_run
from heinsen_jax.runs.metrics_file import read_metrics
from heinsen_jax.runs.weights import save_weights
from tests.models.small import apply

TOKENS = np.random.default_rng(0).integers(0, 257, (2, 20))


def assert_same_logits(one, other):
    np.testing.assert_array_equal(apply(one, TOKENS), apply(other, TOKENS))


def test_a_published_configuration_has_no_folders_of_this_machine():
    column = {"text_column": "meta/text"}
    paths = {"corpus": "/home/me/a.txt", "tokenizer": "/home/me/t", "mixture": {"/x/b": 1.0}}
    config = {
        "data": paths | column,
        "distillation": {"teacher": "secret/teacher", "start": "hf://owner/name"},
        "training": {"compilation_cache": "/home/me/cache", "steps": 3},
    }
    assert hub._without_paths(config) == {
        "data": {"corpus": "a.txt", "tokenizer": "tokenizer.json", "mixture": {"b": 1.0}} | column,
        "distillation": {"teacher": "teacher", "start": "hf://owner/name"},
        "training": {"compilation_cache": None, "start": None, "steps": 3},
    }


@pytest.fixture(scope="module")
def saved(run, tmp_path_factory) -> Path:
    return save_pretrained(run, tmp_path_factory.mktemp("saved") / "model")


@pytest.mark.parametrize("shard_bytes", [None, 20_000, 1])
def test_a_model_survives_saving_and_loading(run, shard_bytes, tmp_path):
    options = {} if shard_bytes is None else {"shard_bytes": shard_bytes}
    folder = save_pretrained(run, tmp_path / "model", **options)
    files = sorted(folder.glob("*.safetensors"))
    if shard_bytes is None:
        assert [file.name for file in files] == ["model.safetensors"]
    else:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert {*index["weight_map"].values()} == {file.name for file in files}
        assert files[0].name == f"model-00001-of-{len(files):05d}.safetensors"
        assert len(files) > 2
    model, tokenizer, step = load_run(run)
    again, other = from_pretrained(folder)
    assert load_run(folder)[2] == step
    assert other.fingerprint == tokenizer.fingerprint
    assert_same_logits(again, model)


def test_a_run_is_exported(run):
    assert_same_logits(from_pretrained(run)[0], load_run(run)[0])


def test_requested_overwrites_are_silent(run, caplog):
    load_run(run)
    assert not [record for record in caplog.records if "read" in record.getMessage()]


def test_the_card_reports_measurements(run, saved, small):
    text = (saved / "README.md").read_text()
    step = load_run(run)[2]
    (row,) = (x for x in read_metrics(run) if x["step"] == step and "validation/loss" in x)
    assert f"| loss | {row['validation/loss']:.4f} |" in text
    assert f"| steps | {step} of {small.training.steps} |" in text
    card = ModelCard(text).data
    assert card.library_name == "heinsen_jax"
    (loss,) = (x for x in card.eval_results if x.metric_type == "loss")
    assert loss.metric_value == round(row["validation/loss"], 4)


def test_the_card_names_all_corpora(run, small, tmp_path):
    mixed = replace(small.data, mixture={"/x/a.txt": 1.0}, mixture_stages=((2, {"/x/b.txt": 1.0}),))
    (tmp_path / "config.json").write_text(json.dumps(as_json(replace(small, data=mixed))))
    card = hub.card(tmp_path, 1, {}, "owner/name")
    assert "| data | a.txt + b.txt |" in card
    assert small.data.corpus not in card


def test_files_have_usual_permissions(run, tmp_path):
    before = os.umask(0o022)
    try:
        folder = save_pretrained(run, tmp_path / "model", shard_bytes=20_000)
    finally:
        os.umask(before)
    assert {oct(path.stat().st_mode & 0o777) for path in folder.iterdir()} == {"0o644"}


def test_an_existing_folder_is_left_alone(run, saved):
    with pytest.raises(UserError, match="exists; give the name of a new folder"):
        save_pretrained(run, saved)


@pytest.mark.parametrize("what", ["shorter", "missing", "other", "index"])
def test_damage_is_named(run, what, tmp_path):
    folder = save_pretrained(run, tmp_path / "model", shard_bytes=20_000)
    file = sorted(folder.glob("*.safetensors"))[1]
    if what == "shorter":
        file.write_bytes(file.read_bytes()[:-100])
    elif what == "missing":
        file.unlink()
    elif what == "other":
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config["model"]["model_dim"] = 64
        file.write_text(json.dumps(config))
    else:
        file = folder / "model.safetensors.index.json"
        file.write_text("{}")
    named = "config.json" if what == "other" else file.name
    with pytest.raises(UserError, match=named):
        from_pretrained(folder)


class Hub:
    """Copy uploads to a folder."""

    def __init__(self, folder: Path):
        self.folder = folder

    def create_repo(self, repo_id, *, private, exist_ok):
        assert exist_ok
        (self.folder / repo_id).mkdir(parents=True, exist_ok=True)
        return f"https://hub/{repo_id}"

    def upload_folder(
        self, *, repo_id, folder_path, allow_patterns, delete_patterns, commit_message
    ):
        assert commit_message
        for file in [*(self.folder / repo_id).iterdir()]:
            if any(file.match(pattern) for pattern in delete_patterns):
                file.unlink()
        for file in Path(folder_path).iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, self.folder / repo_id)


@pytest.mark.parametrize("from_saved", [False, True])
def test_push_and_download(run, saved, from_saved, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HfApi", lambda: Hub(tmp_path))
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **_: str(tmp_path / name))
    assert push(saved if from_saved else run, "me/words") == "https://hub/me/words"
    assert 'from_pretrained("me/words")' in (tmp_path / "me/words/README.md").read_text()
    model, _ = from_pretrained("me/words")
    assert_same_logits(model, load_run(run)[0])


def test_older_files_are_not_downloaded(run, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "HfApi", lambda: Hub(tmp_path))
    push(run, "me/words", shard_bytes=20_000)
    push(run, "me/words")
    assert [file.name for file in (tmp_path / "me/words").glob("*.safetensors*")] == [
        "model.safetensors"
    ]
    assert 'from_pretrained("me/words")' in (tmp_path / "me/words/README.md").read_text()


def test_a_file_in_place_of_shards(run, tmp_path):
    model, _, _ = load_run(run)
    arrays = jax.tree.map(np.asarray, flatten_with_names(nnx.state(model, nnx.Param)))
    save_weights(tmp_path, {name: 0 * x for name, x in arrays.items()}, step=1, shard_bytes=20_000)
    save_weights(tmp_path, arrays, step=2)
    (tmp_path / "config.json").write_text((run / "config.json").read_text())
    for name in ("tokenizer.json", "tokenizer.tiktoken"):
        shutil.copy(run / name, tmp_path / name)
    again, _, step = load_run(tmp_path)
    assert step == 2
    assert_same_logits(again, model)


@pytest.mark.parametrize("error", [LocalEntryNotFoundError("offline"), RuntimeError("offline")])
def test_a_missing_repository_is_named(monkeypatch, error):
    def nothing(*_, **__):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", nothing)
    message = "me/words is not a local folder, and could not be downloaded .*Error: offline"
    with pytest.raises(UserError, match=message):
        from_pretrained("me/words")


def test_errors_of_the_hub_are_reported(saved, monkeypatch):
    class Refusing(Hub):
        def create_repo(self, *_, **__):
            raise RuntimeError("you are not logged in")  # an error of any HTTP client

    monkeypatch.setattr(hub, "HfApi", lambda: Refusing(saved))
    with pytest.raises(UserError, match=r"you are not logged in.*hf auth login"):
        push(saved, "me/words")
