"""Configurations: all shipped ones load, and errors are one line."""

import json
from pathlib import Path

import pytest

from heinsen_jax import data
from heinsen_jax.config import ExperimentConfig, as_json, load_config, override
from heinsen_jax.errors import UserError
from heinsen_jax.models import Layers
from heinsen_jax.runs.folder import RunFolder
from heinsen_jax.training.recorded import check_changes, check_workdir, losses_differ, record

CONFIGS = sorted((Path(__file__).resolve().parents[2] / "configs").glob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_load_and_document_their_command(path):
    assert isinstance(load_config(path), ExperimentConfig)
    assert f"python train.py --config configs/{path.name}" in path.read_text()


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configurations_load_by_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config(path.stem) == load_config(path)


def test_an_unknown_name_lists_all_names():
    names = ", ".join(path.stem for path in CONFIGS)
    with pytest.raises(UserError) as caught:
        load_config("quickstat")
    assert (
        str(caught.value)
        == f"quickstat: no such file; give an existing file or one of the names {names}"
    )


def test_the_papers_recipe_is_300_billion_tokens_of_its_model():
    config = load_config(CONFIGS[0].parent / "heinsen_125m_pile.py")
    tokens = config.training.steps * config.data.batch_size * config.data.sequence_length
    assert 0 <= 300e9 - tokens < config.data.batch_size * config.data.sequence_length
    assert (config.optimizer.learning_rate, config.optimizer.end_learning_rate) == (6e-4, 6e-5)
    assert (config.model.vocab_size, config.model.num_layers) == (50304, 24)


def test_a_recorded_configuration_repeats_the_run(tmp_path):
    config = override(ExperimentConfig(), ["--model.num_layers", "3", "--seed", "5"])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(as_json(config)))
    assert load_config(path) == config
    assert (config.model.num_layers, config.seed) == (3, 5)


def test_attention_on_the_command_line_replaces_the_pattern():
    recall, attention = load_config("recall"), "--model.attention"
    assert recall.model.attention == Layers("log", options={"values": "linear"})
    assert override(recall, ["--seed", "5"]).model == recall.model
    assert override(recall, [attention, "softmax"]).model.attention == "softmax"
    given = [attention, "log:decay=head,max_timescale=64", "softmax:positions=rotary", "--seed=5"]
    assert override(recall, given).model.attention == (
        Layers("log", options={"decay": "head", "max_timescale": 64}),
        Layers("softmax", options={"positions": "rotary"}),
    )


def test_a_run_of_an_earlier_version_with_attention_options_is_read(tmp_path):
    recall = load_config("recall")
    former = as_json(recall)
    options = [["log.values", "linear"]]
    former["model"] |= {"attention": "log", "attention_options": options}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(former))
    assert load_config(path) == recall
    check_workdir(tmp_path, recall)
    other = override(recall, ["--model.attention", "log"])
    with pytest.raises(UserError, match=r"model\.attention is 'log' here, \{'mechanism': 'log'"):
        check_workdir(tmp_path, other)
    former["model"]["attention_options"] = [["log.values"]]
    path.write_text(json.dumps(former))
    for read in (load_config, lambda path: check_workdir(path.parent, recall)):
        with pytest.raises(UserError, match=r"config\.json: model\.attention_options"):
            read(path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model.attention", "log:dcay=head"], ["log.dcay: no such field", "decay"]),
        (["--model.attention", "log:decay"], ["--model.attention: log:decay: 'decay' must be"]),
        (["--model.num_layer", "3"], ["--model.num-layer", "--model.num-layers"]),
        (["--model.num_layers", "four"], ["num-layers", "four"]),
        (["--no-seed"], ["Unrecognized options: --no-seed"]),
        (["--model.num_layers", "0"], ["--model.num-layers: ", "greater than 0"]),
        (["--model.num_heads", "5"], ["num_heads=5 does not divide model_dim=768"]),
        (["--optimizer.beta1", "1.5"], ["beta1", "less than 1"]),
        (["--data.validation_fraction", "2"], ["--data.validation-fraction: ", "less than 1"]),
    ],
)
def test_a_wrong_override_names_its_field(arguments, words, capsys):
    with pytest.raises((UserError, SystemExit)) as caught:
        override(ExperimentConfig(), arguments)
    said = " ".join((str(caught.value) + capsys.readouterr().err).split())
    if isinstance(caught.value, SystemExit):
        assert caught.value.code == 2
    for word in words:
        assert word in said


def test_a_corpus_beside_a_mixture_is_refused():
    mixed = ExperimentConfig(data=data.DataConfig(mixture={"a.txt": 1.0, "b.txt": 2.0}))
    with pytest.raises(UserError, match=r"--data\.corpus has no effect beside data\.mixture"):
        override(mixed, ["--data.corpus", "c.txt"])
    alone = override(mixed, ["--data.corpus", "c.txt", "--data.mixture", "None"]).data
    assert (alone.corpus, alone.mixture) == ("c.txt", None)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nope\.py: no such file"):
        load_config(tmp_path / "nope.py")


def test_a_misspelled_field_in_a_file_is_named(tmp_path):
    path = tmp_path / "wrong.py"
    path.write_text(
        "from heinsen_jax.config import *\n"
        "def get_config():\n    return ExperimentConfig(model=LanguageModelConfig(num_layer=3))\n"
    )
    with pytest.raises(UserError, match=r"wrong\.py: num_layer: no such field"):
        load_config(path)


def test_a_file_may_postpone_the_evaluation_of_annotations(tmp_path):
    (tmp_path / "sizes.py").write_text(
        "from __future__ import annotations\n"
        "from dataclasses import dataclass\n"
        "from heinsen_jax.config import ExperimentConfig\n"
        "@dataclass\nclass Sizes:\n    seed: int = 3\n"
        "def get_config() -> ExperimentConfig:\n    return ExperimentConfig(seed=Sizes().seed)\n"
    )
    assert load_config(tmp_path / "sizes.py").seed == 3


def test_a_file_without_get_config_is_named(tmp_path):
    path = tmp_path / "empty.py"
    path.write_text("")
    with pytest.raises(UserError, match=r"empty\.py defines no get_config"):
        load_config(path)


def test_a_misspelled_field_in_a_recorded_configuration_is_named(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model": {"num_layer": 3}}))
    with pytest.raises(UserError, match=r"config\.json: model\.num_layer: no such field"):
        load_config(path)


def test_another_architecture_is_refused_with_its_differences(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(as_json(ExperimentConfig())))
    other = override(ExperimentConfig(), ["--model.num_layers", "3"])
    with pytest.raises(UserError, match=r"model\.num_layers is 3 here, 24 there"):
        check_workdir(tmp_path, other)
    longer = override(ExperimentConfig(), ["--training.steps", "3000"])
    check_workdir(tmp_path, longer)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run").check_writable()


def test_a_run_of_an_earlier_version_had_continuous_documents(tmp_path):
    """Its files lack fields that were added since."""
    (tmp_path / "a.txt").write_text("to be or not " * 50)
    config = override(
        ExperimentConfig(),
        ["--data.corpus", str(tmp_path / "a.txt"), "--data.cache", str(tmp_path / "cache")],
    )
    dataset = data.load(config.data)
    record(tmp_path, config, dataset)
    for name in ("config.json", "data_manifest.json"):
        content = json.loads((tmp_path / name).read_text())
        content.pop("text_column", None)
        content.get("data", {}).pop("documents", None)
        content.get("model", {}).pop("qk_norm", None)
        (tmp_path / name).write_text(json.dumps(content))
    check_workdir(tmp_path, config)
    changed = r"other settings: data.documents None \(was 'continuous'\); restore"
    with pytest.raises(UserError, match=changed):
        check_changes(tmp_path, config, dataset, allowed=False)
    same = override(config, ["--data.documents", "continuous"])
    assert check_changes(tmp_path, same, dataset, allowed=False) == []


@pytest.mark.parametrize(
    ("change", "is_refused", "losses_change"),
    [
        (["--optimizer.learning_rate", "0.1"], True, False),
        (["--data.num_letters", "3"], True, True),
        (["--seed", "7"], True, False),
        (["--training.z_loss", "1e-4"], True, False),
        (["--training.evaluation_batches", "3"], True, True),
        (["--training.steps", "3000"], False, False),
        (["--training.log_every", "3"], False, False),
        (["--data.test_lengths", "9"], False, False),
    ],
)
def test_changes_that_affect_the_result_are_refused(change, is_refused, losses_change, tmp_path):
    config = ExperimentConfig(data=data.Induction())
    dataset = data.load(config.data)
    record(tmp_path, config, dataset)
    changed = override(config, change)
    name = change[0].removeprefix("--")
    if is_refused:
        with pytest.raises(UserError, match=f"a run with other settings: {name} "):
            check_changes(tmp_path, changed, dataset, allowed=False)
    (line,) = check_changes(tmp_path, changed, dataset, allowed=True)
    assert losses_differ(tmp_path, changed, dataset) == losses_change
    assert line.startswith(f"{name} ")
    assert is_refused or check_changes(tmp_path, changed, dataset, allowed=False) == [line]
    assert check_changes(tmp_path, config, dataset, allowed=False) == []


def test_corpora_of_mixtures_may_move_but_not_change_places(tmp_path):
    """Their number is part of the seed of their rows."""

    def mixed(*corpora):
        weights = dict.fromkeys(corpora, 1.0)
        mixture = data.DataConfig(mixture=weights, mixture_stages=((9, weights),))
        return ExperimentConfig(data=mixture)

    dataset = data.load(data.Induction())
    record(tmp_path, mixed("/x/a.txt", "/x/b.txt"), dataset)
    assert check_changes(tmp_path, mixed("/y/a.txt", "/y/b.txt"), dataset, allowed=False) == []
    with pytest.raises(UserError, match=r"data\.mixture .*data\.mixture_stages "):
        check_changes(tmp_path, mixed("/x/b.txt", "/x/a.txt"), dataset, allowed=False)
