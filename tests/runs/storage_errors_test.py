"""Errors of disks and buckets are distinguished from device errors and bugs."""

import jax
import pytest

from heinsen_jax.runs.storage_errors import is_of_storage


def caused(cause: Exception) -> Exception:
    try:
        raise RuntimeError("the save failed") from cause
    except RuntimeError as error:
        return error


@pytest.mark.parametrize(
    ("error", "is_expected"),
    [
        (OSError(28, "No space left on device"), True),
        (ValueError("Failed to write 9 bytes: File too large [os_error_code='27']"), True),
        (ValueError("PERMISSION_DENIED: HTTP response code: 403"), True),
        (caused(PermissionError(13, "Permission denied")), True),
        (caused(KeyError("step")), False),
        (ValueError("the step has another structure"), False),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
    ],
)
def test_errors_of_storage_are_recognized(error, is_expected):
    assert bool(is_of_storage(error)) == is_expected
