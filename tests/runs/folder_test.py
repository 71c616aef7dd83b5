"""Files of a run are uploaded when they have changed, also after an error."""

import pytest
from etils import epath

from heinsen_jax.errors import UserError
from heinsen_jax.runs.folder import RunFolder
from heinsen_jax.storage import buckets


@pytest.fixture
def uploaded(monkeypatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(buckets, "upload", lambda content, target: names.append(str(target)))
    return names


@pytest.fixture
def run(tmp_path) -> RunFolder:
    return RunFolder(tmp_path, epath.Path("gs://bucket/run"))


def test_changed_files_are_uploaded_once(run, uploaded):
    (run.files / "samples").mkdir()
    (run.files / "samples/one.txt").write_text("text")
    (run.files / "metrics.jsonl").write_text("1\n")
    (run.files / "metrics.jsonl.partial").write_text("1\n2\n")
    run.publish()
    assert sorted(uploaded) == [
        f"gs://bucket/run/{x}" for x in ("metrics.jsonl", "samples/one.txt")
    ]
    run.publish()
    assert len(uploaded) == 2
    (run.files / "metrics.jsonl").write_text("1\n2\n")
    run.publish()
    assert uploaded[2:] == ["gs://bucket/run/metrics.jsonl"]


def test_files_are_uploaded_after_an_error_that_takes_precedence(run, uploaded, monkeypatch):
    (run.files / "metrics.jsonl").write_text("1\n")
    with pytest.raises(ZeroDivisionError), run.published():
        raise ZeroDivisionError
    assert len(uploaded) == 1

    def fail(content, target):
        raise UserError("the network is down")

    monkeypatch.setattr(buckets, "upload", fail)
    (run.files / "metrics.jsonl").write_text("1\n2\n")
    with pytest.raises(ZeroDivisionError), run.published():
        raise ZeroDivisionError
    with pytest.raises(UserError, match="the network is down"), run.published():
        pass


def test_a_run_on_a_disk_uploads_nothing(tmp_path, uploaded):
    (tmp_path / "metrics.jsonl").write_text("1\n")
    with RunFolder(tmp_path).published():
        pass
    assert not uploaded
