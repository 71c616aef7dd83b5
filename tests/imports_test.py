"""Import direction: a package imports only from those before it."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "heinsen_jax"
LOWEST = {"errors", "typing", "pytrees"}
ALLOWED = {
    "errors": set(),
    "typing": set(),
    "pytrees": {"typing"},
    "buckets": LOWEST,
    "locks": LOWEST,
    "run_folder": LOWEST | {"buckets", "locks"},
    "ops": LOWEST,
    "sharding": LOWEST,
    "allocator": set(),
    "compilation": set(),
    "environment": set(),
    "on_ray": LOWEST,
    "distributed": LOWEST | {"buckets"},
    "attention": LOWEST | {"ops", "sharding"},
    "models": LOWEST | {"ops", "attention", "sharding"},
    "data": LOWEST | {"on_ray", "locks", "buckets"},
    "interop": LOWEST
    | {"attention", "models", "data", "training", "generate", "run_folder", "buckets", "config"},
    "training": LOWEST
    | {"compilation", "environment", "attention", "models", "sharding", "distributed", "data"}
    | {"buckets", "run_folder"},
    "generate": LOWEST | {"compilation", "attention", "models", "data", "training"},
    "chat": LOWEST | {"models", "data", "training", "generate"},
    "evaluate": LOWEST
    | {"allocator", "compilation", "data", "models", "sharding", "training", "config", "generate"}
    | {"run_folder"},
    "suggestions": LOWEST,
    "config": LOWEST
    | {"suggestions", "models", "sharding", "data", "training", "buckets", "run_folder"},
    "field_help": LOWEST | {"config"},
    "train": LOWEST
    | {"allocator", "distributed", "run_folder", "data", "training", "generate", "config"}
    | {"field_help"},
    "linearize_results": LOWEST
    | {"models", "data", "training", "config", "evaluate", "distributed", "sharding"},
    "linearize": LOWEST
    | {"linearize_results"}
    | {"allocator", "environment", "attention", "models", "data", "training", "config", "evaluate"}
    | {"train", "distributed", "run_folder", "buckets", "sharding"},
    "study": LOWEST
    | {
        "allocator",
        "environment",
        "on_ray",
        "locks",
        "attention",
        "models",
        "data",
        "training",
        "config",
        "linearize",
    }
    | {"run_folder", "buckets"},
}


def part(file: Path) -> str:
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(file: Path) -> set[str]:
    found = set()
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
                found.add(rest[0])
    return found


def test_imports_follow_the_layers():
    for file in sorted(PACKAGE.rglob("*.py")):
        own = part(file)
        if file.name == "__init__.py" and own not in ALLOWED:
            continue
        assert own in ALLOWED, f"say in this test what {own} may import"
        more = imported_parts(file) - ALLOWED[own] - {own}
        assert not more, f"{file.relative_to(PACKAGE)} imports {more}"


def test_nothing_is_imported_inside_a_function():
    for file in PACKAGE.rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                inner = [
                    n for n in ast.walk(function) if isinstance(n, ast.Import | ast.ImportFrom)
                ]
                assert not inner, f"{file}:{function.lineno}"
