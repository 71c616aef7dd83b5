"""One owner of a folder at a time; tests/faults/locks_test.py has other processes."""

import json
import os

import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.storage.locks import LOCK_FILE, locked


def test_a_folder_has_one_owner_at_a_time(tmp_path):
    with locked(tmp_path):
        assert json.loads((tmp_path / LOCK_FILE).read_text())["pid"] == os.getpid()
        with pytest.raises(UserError, match=f"in use by process {os.getpid()}"), locked(tmp_path):
            raise AssertionError
    assert (tmp_path / LOCK_FILE).read_text() == ""
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path), locked(tmp_path / ".."):
        pass
