import hashlib
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from heinsen_jax.data import corpora
from heinsen_jax.data.corpora import CORPORA, corpus_sources
from heinsen_jax.data.download import Remote, ensure_downloaded
from heinsen_jax.errors import UserError

CONTENT = b"To be, or not to be\n" * 100_000


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[:1000] if self.path == "/cut" else CONTENT)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}"
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def remote(url: str, content: bytes = CONTENT) -> Remote:
    return Remote(url, len(content), hashlib.sha256(content).hexdigest())


def test_download_is_kept_and_not_repeated(server: str, tmp_path: Path) -> None:
    path = tmp_path / "downloads" / "hamlet.txt"
    ensure_downloaded(remote(f"{server}/good"), path)
    assert path.read_bytes() == CONTENT
    assert list(path.parent.iterdir()) == [path]
    ensure_downloaded(remote("http://127.0.0.1:1/file"), path)


@pytest.mark.parametrize("case", ["missing", "cut", "other", "refused"])
def test_failed_download_leaves_nothing_and_says_what_to_do(
    server: str, tmp_path: Path, case: str
) -> None:
    expected = remote(f"{server}/{case}", b"something else" if case == "other" else CONTENT)
    if case == "refused":
        expected = remote("http://127.0.0.1:1/refused")
    path = tmp_path / "hamlet.txt"
    with pytest.raises(UserError) as caught:
        ensure_downloaded(expected, path)
    for part in (expected.url, str(path), expected.sha256):
        assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_file_saved_by_hand_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "hamlet.txt"
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(UserError, match=r"hamlet\.txt is not the published file; delete it"):
        ensure_downloaded(remote("http://127.0.0.1:1/file"), path)


def test_tinyshakespeare_is_the_known_file(published_data: Path) -> None:
    known = CORPORA["tinyshakespeare"].remote
    assert known is not None
    path = published_data / "tinyshakespeare.txt"
    assert path.stat().st_size == known.size
    ensure_downloaded(known, path)  # checks the hash, and downloads nothing


@pytest.mark.parametrize("name", sorted(set(CORPORA) - {"python-stdlib"}))
def test_planning_a_corpus_downloads_nothing(name: str, tmp_path: Path) -> None:
    (source,) = corpus_sources(name, tmp_path)
    assert source.remote is not None
    assert len(source.remote.sha256) == 64
    assert source.size == source.remote.size
    assert list(tmp_path.iterdir()) == []


def test_standard_library_excludes_its_tests(tmp_path: Path) -> None:
    sources = corpus_sources("python-stdlib", tmp_path)
    names = [source.name for source in sources]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"python-stdlib-{version}/dataclasses.py" in names
    assert f"python-stdlib-{version}/json/decoder.py" in names
    assert 5e6 < sum(source.size for source in sources) < 40e6
    forbidden = ("/test/", "/tests/", "/idle_test/", "site-packages", "__pycache__")
    assert not [name for name in names if any(part in name for part in forbidden)]


def test_library_order_does_not_depend_on_the_file_system(tmp_path: Path) -> None:
    for name in ("b.py", "a/z.py", "a.py", "a/tests/t.py", "a/empty.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("" if "empty" in name else "pass\n")
    sources = corpora._library_sources("lib", "python", tmp_path)
    assert [source.path.relative_to(tmp_path).as_posix() for source in sources] == [
        "a/z.py",
        "a.py",
        "b.py",
    ]
