"""Values that differ between processes are named."""

import json

import pytest

from heinsen_jax.errors import UserError
from heinsen_jax.runtime import distributed
from heinsen_jax.runtime.distributed import check_alike, together

OURS = {"seed": 1, "jax": "0.10"}


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        ({"seed": 2, "jax": "0.10"}, r"process 1 differs from process 0 in seed \(2, not 1\)"),
        ({"seed": 1}, r"in jax \(None, not '0\.10'\)"),
        (OURS | {"more": 3}, r"in more \(3, not None\)"),
    ],
)
def test_values_that_differ_between_processes_are_named(theirs, message, monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda text: [text, json.dumps(theirs)])
    with pytest.raises(UserError, match=message):
        check_alike(OURS)


def test_equal_values_are_accepted(monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda text: [text] * 3)
    check_alike(OURS)


def test_a_failure_of_another_process_ends_this_one(monkeypatch):
    monkeypatch.setattr(distributed, "gather", lambda text: [text, "no space"])
    with pytest.raises(UserError, match="process 1 ended with: no space"), together():
        pass


def test_a_failure_is_told_to_the_others(monkeypatch):
    said = []
    monkeypatch.setattr(distributed, "gather", lambda text: said.append(text) or [text])
    with pytest.raises(UserError, match="no space"), together():
        raise UserError("no space")
    assert said == ["no space"]
