"""Objects, locks and files of runs in a bucket."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from etils import epath

from heinsen_jax.data import DataConfig
from heinsen_jax.data.prepare import prepare
from heinsen_jax.data.text import load_text
from heinsen_jax.errors import UserError
from heinsen_jax.runs import folder as run_folder
from heinsen_jax.runs.folder import open_run, set_aside
from heinsen_jax.storage import buckets
from heinsen_jax.storage.buckets import LOCK_FILE, bucket_path, locked


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/run", "--workdir s3://bucket/run: only buckets of Google Cloud Storage"),
        (
            "gs://bucket",
            r"--workdir gs://bucket: the bucket or the folder is missing; give gs://bucket/folder",
        ),
    ],
)
def test_other_addresses_are_refused(url, message):
    with pytest.raises(UserError, match=message), open_run(url):
        raise AssertionError


def test_the_missing_extra_is_named(monkeypatch):
    def missing(*_, **__):
        raise ImportError("Please install gcsfs")

    monkeypatch.setattr(buckets.fsspec, "filesystem", missing)
    with pytest.raises(UserError, match=r"pip install 'heinsen_jax\[gcs\]'"), open_run("gs://a/b"):
        raise AssertionError


def test_objects_of_other_processes_are_found(bucket):
    """Even where `epath` lists a folder before this package opens a bucket."""
    script = """
import sys
import fsspec
from etils import epath
from heinsen_jax.storage import buckets
folder = epath.Path(sys.argv[1])
(folder / "ours").write_text("")
assert [path.name for path in folder.iterdir()] == ["ours"]
other = fsspec.filesystem("gcs", skip_instance_cache=True)
other.pipe_file(f"{folder}/theirs", b"content")
assert (folder / "theirs").read_text() == "content"
"""
    subprocess.run([sys.executable, "-c", script, bucket], check=True)


def test_a_bucket_that_does_not_exist_is_refused(bucket):
    with (
        open_run("gs://other-bucket/run") as run,
        pytest.raises(UserError, match="--workdir gs://other-bucket/run cannot be written"),
    ):
        run.check_writable()


def test_files_of_a_run_are_uploaded_when_they_change(bucket, monkeypatch):
    uploaded = []
    upload = buckets.upload
    monkeypatch.setattr(
        buckets, "upload", lambda x, path: (uploaded.append(path.name), upload(x, path))
    )
    with open_run(bucket) as run:
        run.check_writable()
        (run.files / "metrics.jsonl").write_text("1\n")
        (run.files / "samples").mkdir()
        (run.files / "samples/step_1.txt").write_text("text")
        run.publish()
        with (run.files / "metrics.jsonl").open("a") as file:
            file.write("2\n")
        run.publish()
    assert sorted(uploaded) == ["metrics.jsonl", "metrics.jsonl", "step_1.txt"]
    assert not run.files.exists()
    with open_run(bucket) as run:
        assert (run.files / "metrics.jsonl").read_text() == "1\n2\n"
        assert run.files.name == bucket.rpartition("/")[2]
        run.publish()
        assert len(uploaded) == 3, "nothing has changed"
        (run.files / "config.json").write_text("{}")
        with pytest.raises(ZeroDivisionError), run.published():
            raise ZeroDivisionError
    assert (epath.Path(bucket) / "config.json").read_text() == "{}"


def test_files_that_change_before_the_lock_is_taken_are_read(bucket):
    metrics = epath.Path(bucket) / "metrics.jsonl"
    metrics.write_text("1\n")
    with open_run(bucket) as run:
        metrics.write_text("1\n2\n")  # by the previous owner, which now ends
        with run.locked():
            assert (run.files / "metrics.jsonl").read_text() == "1\n2\n"


def test_restart_sets_a_run_aside(bucket):
    for number in ("", "-2"):
        with open_run(bucket) as run:
            (run.files / "metrics.jsonl").write_text(f"rows{number}")
            run.publish()
            (epath.Path(bucket) / "checkpoints/5/file").write_text("arrays")
        with open_run(bucket) as run:
            set_aside(run)
            assert not list(run.files.iterdir())
        aside = epath.Path(bucket) / f"before-restart{number}"
        assert (aside / "metrics.jsonl").read_text() == f"rows{number}"
        assert (aside / "checkpoints/5/file").read_text() == "arrays"
        assert not (epath.Path(bucket) / "checkpoints").exists()


def test_temporary_files_that_vanish_are_not_uploaded(bucket, monkeypatch):
    def vanishing(path):
        if path.name != "config.json":
            path.unlink()
        return version(path)

    version = run_folder._version
    monkeypatch.setattr(run_folder, "_version", vanishing)
    with open_run(bucket) as run:
        for name in ("config.json", "lock.tmp", "x.partial"):
            (run.files / name).write_text("{}")
        run.publish()
        assert (run.files / "x.partial").exists(), "its version is not computed"
    assert [path.name for path in epath.Path(bucket).iterdir()] == ["config.json"]


def test_two_threads_upload_a_file_once(bucket, monkeypatch):
    uploaded = []

    def slow(content, path):
        uploaded.append(path.name)
        time.sleep(0.2)

    monkeypatch.setattr(buckets, "upload", slow)
    with open_run(bucket) as run:
        (run.files / "config.json").write_text("{}")
        thread = threading.Thread(target=run.publish)
        thread.start()
        run.publish()
        thread.join()
    assert uploaded == ["config.json"]


@pytest.mark.parametrize("error", [RuntimeError("Internal Error, 500"), OSError("Forbidden: x\ny")])
def test_failed_reads_of_a_bucket_are_one_line(bucket, error):
    message = rf"data.corpus gs://.*/x cannot be read \({str(error).splitlines()[0]}\); check the"
    with (
        pytest.raises(UserError, match=message),
        buckets.reading(epath.Path(bucket) / "x", "data.corpus"),
    ):
        raise error


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(buckets, "REFRESHED_AFTER", 0.2)
    monkeypatch.setattr(buckets, "ABANDONED_AFTER", 1.0)


def other(folder, **changes) -> None:
    """Write the lock of another process."""
    owner = {"host": "elsewhere", "pid": 1, "start": "2030-01-01", "id": "x", "renewed": 0}
    (folder / LOCK_FILE).write_text(json.dumps(owner | changes))


class Objects(dict[str, bytes]):
    """A file system of objects in memory."""

    def cat_file(self, path: str) -> bytes:
        if path not in self:
            raise FileNotFoundError(path)
        return self[path]

    def pipe_file(self, path: str, content: bytes, mode: str = "overwrite") -> None:
        if mode == "create" and path in self:
            raise FileExistsError(path)
        self[path] = content

    def rm_file(self, path: str) -> None:
        del self[path]


@pytest.fixture
def objects(monkeypatch) -> Objects:
    found = Objects()
    monkeypatch.setattr(buckets, "file_system", lambda: found)
    return found


def test_a_lock_exists_while_it_is_held(objects, fast, capsys):
    folder, path = epath.Path("gs://bucket/run"), "gs://bucket/run/.lock"
    with locked(folder):
        assert json.loads(objects[path])["pid"] == os.getpid()
        with pytest.raises(UserError, match=f"is in use by process {os.getpid()}"), locked(folder):
            raise AssertionError
        assert path in objects
    assert not objects
    with pytest.raises(ZeroDivisionError), locked(folder):
        raise ZeroDivisionError
    assert not objects


def test_a_lock_is_refused_while_its_owner_renews_it(bucket, fast, capsys):
    folder = bucket_path(bucket, "--workdir")
    owner = f"in use by process {os.getpid()} on {socket.gethostname()}, since 20"
    with locked(folder), pytest.raises(UserError, match=owner), locked(folder):
        raise AssertionError
    assert not (folder / LOCK_FILE).exists()
    with locked(folder):
        assert (folder / LOCK_FILE).exists()


def test_a_lock_that_is_not_renewed_is_abandoned(bucket, fast, capsys):
    folder = bucket_path(bucket, "--workdir")
    other(folder)
    start = time.monotonic()
    with locked(folder):
        assert time.monotonic() - start > 1
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert "may be in use by process 1 on elsewhere, since 2030" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["[]", *(pytest.param(x, marks=pytest.mark.nightly) for x in ("", '{"host": "elsewhere"}'))],
)
def test_a_damaged_lock_is_of_an_unknown_owner(bucket, fast, capsys, content):
    folder = bucket_path(bucket, "--workdir")
    (folder / LOCK_FILE).write_text(content)
    with locked(folder):
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert "may be in use by another process: waiting" in capsys.readouterr().err


def test_a_lock_of_another_host_with_the_same_name_is_respected(bucket, fast, monkeypatch, capsys):
    """Both have the initial namespace of process ids; the process is not one of this host."""
    read = Path.read_text
    here = buckets._process_namespace()

    def elsewhere(path, *args):
        return "another boot" if path.name == "boot_id" else read(path, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_text", elsewhere)
        there = buckets._process_namespace()
    assert there.split()[-1] == here.split()[-1]
    folder = bucket_path(bucket, "--workdir")
    other(folder, host=socket.gethostname(), pid=1 << 22, processes=there)
    with locked(folder):
        assert "may be in use by process" in capsys.readouterr().err


def test_the_lock_of_a_dead_process_of_this_host_is_abandoned(bucket, capsys):
    folder = bucket_path(bucket, "--workdir")
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
        here = {"host": socket.gethostname(), "processes": buckets._process_namespace()}
        other(folder, pid=ended.pid, **here)
    with locked(folder):
        assert json.loads((folder / LOCK_FILE).read_text())["pid"] == os.getpid()
    assert capsys.readouterr().err == ""


def test_an_owner_that_has_lost_its_lock_ends(bucket, fast, monkeypatch, capsys):
    ended = threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set())
    folder = bucket_path(bucket, "--workdir")
    with locked(folder):
        other(folder)
        assert ended.wait(10)
    assert "another process has locked" in capsys.readouterr().err
    assert (folder / LOCK_FILE).exists(), "of the other process"


def test_one_of_two_starters_gets_the_lock(bucket, monkeypatch):
    """The other one creates it after this one has found none."""
    folder = bucket_path(bucket, "--workdir")
    read = buckets._Lock._read
    monkeypatch.setattr(buckets._Lock, "_read", lambda lock: read(lock) or other(folder))
    with pytest.raises(UserError, match="in use by process 1 on elsewhere"), locked(folder):
        raise AssertionError


@pytest.mark.parametrize("path", ["gs://b/data", Path("gs://b/data")])
def test_addresses_are_refused_where_only_disks_are_supported(path, tmp_path, monkeypatch):
    """`Path` would make a local folder of the name `gs:`."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"output gs:/+b/data: must be on a disk"):
        prepare([], "bytes", path)
    with pytest.raises(UserError, match=r"data.cache gs:/+b/data: must be on a disk"):
        load_text(DataConfig(cache=str(path)))
    assert buckets.local_path("C:/data", "output") == Path("C:/data")
    assert not [*tmp_path.iterdir()]
