"""An emulator of Google Cloud Storage, with the bucket `bucket`."""

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.multi_device.apart import free_port

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def emulator() -> Iterator[dict[str, str]]:
    """Yield the environment variables that lead clients to an emulator."""
    port = free_port()
    command = [sys.executable, str(HERE / "emulator.py"), str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        address, deadline = f"http://localhost:{port}", time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/storage/v1/b?project=test").close()
                break
            except OSError:
                assert time.monotonic() < deadline, "the emulator did not start"
                time.sleep(0.1)
        yield {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
            "GOOGLE_CLOUD_PROJECT": "test",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",  # would ask for the kind of bucket
        }
        server.kill()


@pytest.fixture
def bucket(emulator, monkeypatch, tmp_path) -> str:
    """Return the address of an empty folder in the bucket, for this process and its children."""
    for name, value in emulator.items():
        monkeypatch.setenv(name, value)
    return f"gs://bucket/{tmp_path.name}"
