"""Chat templates of tokenizers: Jinja, as the library transformers renders them."""

import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from heinsen_jax.errors import UserError

MAX_SECONDS = 5.0
"""Time limit of rendering, in seconds, after which its process is killed."""
START_SECONDS = 60.0
"""Time limit of the start of that process."""
MAX_CHARACTERS = 20_000_000
"""Length of a rendered text."""
_REMEDY = "change the messages, or the template in the files of the tokenizer"


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template in a sandbox, since templates are code from others.

    A separate process renders it, with limits of time, memory and output.

    Raises:
      UserError: the template is invalid, exceeds a limit, or refuses the variables.
    """
    request = {
        "template": template,
        "variables": dict(variables),
        "max_characters": MAX_CHARACTERS,
    }
    try:
        line = json.dumps(request)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"chat template: {error}; give messages of JSON values") from None
    answer = _worker.answer(line)
    if "error" in answer:
        raise UserError(f"chat template: {answer['error']}; {_REMEDY}")
    return answer["text"]


class _Worker:
    """The process, which starts at the first request, and again after it has ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def answer(self, line: str) -> dict[str, str]:
        """Send a request and wait for its answer, at most `MAX_SECONDS`."""
        with self._lock:
            process = self._started()
            assert process.stdin is not None
            assert process.stdout is not None
            timer = threading.Timer(MAX_SECONDS, process.kill)
            timer.start()
            answer = ""
            try:
                with contextlib.suppress(OSError):  # it has ended
                    process.stdin.write(line + "\n")
                    process.stdin.flush()
                    answer = process.stdout.readline()
            finally:
                timer.cancel()
                if not answer.endswith("\n"):
                    self.end()
        if not answer.endswith("\n"):
            return {"error": f"it needs more than {MAX_SECONDS:g} s, or too much memory"}
        return json.loads(answer)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            path = Path(__file__).with_name("chat_template_worker.py")
            paths = os.pathsep.join([str(Path(jinja2.__file__).parents[1]), *sys.path[1:]])
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # Ctrl-C is for its parent
                env={**os.environ, "PYTHONPATH": paths, "PYTHONIOENCODING": "utf-8"},
            )
            assert self._process.stdout is not None
            timer = threading.Timer(START_SECONDS, self._process.kill)
            timer.start()
            is_ready = self._process.stdout.readline()  # its start does not count
            timer.cancel()
            if not is_ready:
                self.end()
                raise UserError(
                    "chat template: the process that renders it does not start; check that this "
                    "Python can run others, and the installation of jinja2"
                )
        return self._process

    def end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


_worker = _Worker()
atexit.register(_worker.end)
