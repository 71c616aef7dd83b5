"""`python -m pytest --changed`: tests of the files changed since main, by the graph of imports.

A file depends on the modules that it imports, and on modules and configurations named in its
strings, such as `load_config("quickstart")`; a test also on other files that its strings name, as a
file, a folder or a pattern, and on the `conftest.py` of its folder and of those above.
"""

import ast
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> list[str]:
    run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.splitlines()


def changed_files(since: str) -> set[str]:
    """Files, relative to the root, that differ from the common ancestor with a commit."""
    (base,) = git("merge-base", since, "HEAD")
    names = git("diff", "--name-only", base)
    return {*names, *git("ls-files", "--others", "--exclude-standard")}


@cache
def python_files() -> frozenset[str]:
    files = git("ls-files", "--cached", "--others", "--exclude-standard", "*.py")
    return frozenset(file for file in files if (ROOT / file).exists())


def module_of(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def parsed(file: str) -> ast.Module:
    """A file that is not valid yet, while it is written, depends on nothing."""
    try:
        return ast.parse((ROOT / file).read_text())
    except SyntaxError:
        return ast.Module([], [])


@cache
def imports_of(file: str) -> frozenset[str]:
    """Names that a file imports: of modules, and of functions, which match no file."""
    found: set[str] = set()
    for node in ast.walk(parsed(file)):
        match node:
            case ast.Import(names):
                found |= {alias.name for alias in names}
            case ast.ImportFrom(module=str(module), names=names):
                found |= {module, *(f"{module}.{alias.name}" for alias in names)}
    if Path(file).name.endswith("_test.py"):
        found |= {".".join([*folder.parts, "conftest"]) for folder in Path(file).parents}
    return frozenset(found)


@cache
def strings_of(file: str) -> frozenset[str]:
    nodes = ast.walk(parsed(file))
    return frozenset(x.value for x in nodes if isinstance(x, ast.Constant) and type(x.value) is str)


def depends(file: str, changed: str) -> bool:
    """Whether a file imports or names another one."""
    path, strings = Path(changed), strings_of(file)
    if path.suffix != ".py":
        if not file.startswith("tests/") or Path(file).name == "conftest.py":
            return False
        names = {path.stem, *map(str, path.parents)} - {"."}
        return any(
            path.name in text or text in names or ("*." in text and path.match(text))
            for text in strings
        )
    if path.parts[0] == "configs":
        names = {path.stem, path.name, changed, changed.removesuffix(".py")}
        return bool(names & strings) or any(changed in text for text in strings)
    is_named = "." in (module := module_of(changed)) and Path(file).name != "conftest.py"
    return module in imports_of(file) or (is_named and bool({module, changed} & strings))


def affected(changed: set[str]) -> set[str]:
    """The changed files, and all files that depend on them."""
    done, new = set(changed), set(changed)
    while new:
        others = python_files() - done
        new = {file for file in others if any(depends(file, one) for one in new)}
        done |= new
    return done
