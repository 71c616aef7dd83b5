"""Rendering of chat templates in a process of its own; tests/faults/pretrained_test.py has
templates that exceed its limits."""

import threading

import pytest

from heinsen_jax.data import chat_template
from heinsen_jax.errors import UserError


def test_no_time_limit_outlives_its_answer():
    assert chat_template.render("{{ x }}", {"x": "a"}) == "a"
    process = chat_template._worker._process
    assert process is not None
    timers = [x for x in threading.enumerate() if isinstance(x, threading.Timer)]
    for timer in timers:
        if timer.function == process.kill:
            timer.join(1)
            assert not timer.is_alive()
    assert process.poll() is None


CIRCULAR: list = []
CIRCULAR.append(CIRCULAR)


@pytest.mark.parametrize("value", [b"bytes", CIRCULAR], ids=["bytes", "circular"])
def test_variables_that_are_not_json_are_refused(value):
    with pytest.raises(UserError, match=r"chat template: .*; give messages of JSON values"):
        chat_template.render("{{ x }}", {"x": value})
