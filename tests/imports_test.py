"""Import direction: a package imports only from those before it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "heinsen_jax"
ORDER = [
    {"errors", "typing"},
    {"pytrees", "sharding", "storage"},
    {"runtime", "ops"},
    {"goom"},
    {"attention"},
    {"models"},
    {"data"},
    {"runs", "objectives"},
    {"generate"},
    {"chat", "interop"},
    {"training"},
    {"config"},
    {"evaluate", "linearize", "train"},
]
"""Layers of the package. A part imports only from those before it."""


def part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(file: Path) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if first == "heinsen_jax" and rest:
                parts.add(rest[0])
    return parts


def test_imports_follow_the_layers():
    ranks = {name: rank for rank, names in enumerate(ORDER) for name in names}
    for file in sorted(PACKAGE.rglob("*.py")):
        own = part(file)
        if file == PACKAGE / "__init__.py":
            continue
        wrong = {x for x in imported_parts(file) if ranks[x] >= ranks[own] and x != own}
        assert not wrong, f"{file.relative_to(PACKAGE)} imports {wrong}"


def test_few_modules_are_outside_of_subpackages():
    assert len([*PACKAGE.glob("*.py")]) <= 8


def test_nothing_is_imported_inside_a_function():
    for file in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                inner = [
                    n for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)
                ]
                assert not inner, f"{file}:{function.lineno}"
