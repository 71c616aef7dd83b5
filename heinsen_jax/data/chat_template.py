"""Chat templates of tokenizers: Jinja, as the library transformers renders them."""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any, NoReturn

from heinsen_jax.errors import UserError, without_extra

try:
    from jinja2 import Template, TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as missing:
    raise without_extra(missing, "transformers", __name__) from missing


class _Generation(Extension):
    """`{% generation %}`, which marks answers of the model: its content."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template in a sandbox, since templates are code from others.

    Raises:
      UserError: the template is invalid, or refuses the variables.
    """
    try:
        return _compiled(template).render(**variables)
    except (TemplateError, TypeError, ValueError) as error:
        raise UserError(
            f"chat template: {error}; change the messages, or the template in the files of the "
            "tokenizer"
        ) from None


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
