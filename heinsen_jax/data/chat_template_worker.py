"""A separate process that renders chat templates: it reads and writes lines of JSON.

Its parent can end it. It imports nothing of this package, so that it starts fast.
"""

import contextlib
import datetime
import functools
import json
import sys
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

try:
    import resource
except ImportError:  # not on Windows
    resource = None

MEMORY_BYTES = 2**30


class _Generation(Extension):
    """Render the content of `{% generation %}`, which marks answers of the model."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compiled(template: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without escapes for HTML, which Jinja's own filter adds."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    """The text of a request, or the reason for a refusal."""
    limit, size, parts = request["max_characters"], 0, []
    try:
        for part in _compiled(request["template"]).generate(**request["variables"]):
            size += len(part)
            if size > limit:
                return {"error": f"its text exceeds {limit} characters"}
            parts.append(part)
    except MemoryError:
        return {"error": f"it needs more than {MEMORY_BYTES / 2**30:g} GiB of memory"}
    except Exception as error:  # a template may raise any error
        reason = " ".join(str(error).split()) or type(error).__name__
        return {"error": reason[:1000]}
    return {"text": "".join(parts)}


def main() -> None:
    """Answer requests until the input ends."""
    if resource is not None:
        with contextlib.suppress(ValueError, OSError):  # some systems have no such limit
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
