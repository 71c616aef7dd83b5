"""Numbers of the pages come from the records."""

from pathlib import Path

import pytest
from jinja2 import UndefinedError

from docs.figures import render

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs").rglob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_expressions_have_values(page):
    render(page.read_text())


@pytest.mark.parametrize(
    "expression", ["record('gated').missing", "log", "''", "at_budgets('GLA')[2]"]
)
def test_an_expression_without_a_value_is_an_error(expression):
    with pytest.raises((UndefinedError, ValueError)):
        render(f"{{{{ {expression} }}}}")
