"""The data of `heinsen_jax.evaluate --data`, and the results of tasks."""

import json
from pathlib import Path

import pytest

from heinsen_jax import evaluate
from heinsen_jax.data import DataConfig
from heinsen_jax.evaluate import _of_data

TRAINED = DataConfig(
    mixture={"a.txt": 1.0, "folder/b.txt": 2.0},
    mixture_stages=((5, {"c.txt": 1.0}),),
    validation_fraction=0.2,
)


@pytest.mark.parametrize("name", ["a.txt", "c.txt", "./folder/b.txt"])
def test_only_the_validation_text_of_training_data_is_evaluated(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path(name).write_text("text")
    settings, is_other = _of_data(TRAINED, name, "text")
    assert not is_other
    assert settings.corpus == name.removeprefix("./")
    assert (settings.mixture, settings.mixture_stages) == (None, ())
    assert settings.validation_fraction == 0.2


def test_other_data_are_evaluated_completely():
    settings, is_other = _of_data(TRAINED, "d.txt", "title")
    assert is_other
    assert (settings.corpus, settings.text_column) == ("d.txt", "title")
    assert settings.validation_fraction is None


def test_results_of_tasks_are_written_before_the_table_is_printed(tmp_path, monkeypatch):
    """A closed pipe does not lose them."""

    class Harness:
        run_tasks = staticmethod(lambda *_, **__: {"results": {"task": {"acc": 1.0}}})
        make_table = staticmethod(str)

    def closed(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(evaluate, "extra_module", lambda name: Harness)
    monkeypatch.setattr("builtins.print", closed)
    options = evaluate.Options(workdir="run", tasks=("task",), output=tmp_path / "results.json")
    with pytest.raises(BrokenPipeError):
        evaluate._run_tasks(options)
    assert json.loads(options.output.read_text()) == {"task": {"acc": 1.0}}
