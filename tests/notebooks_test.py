"""Notebooks run, equal their scripts, and are committed without outputs.

Executed notebooks are written to `build/notebooks` as HTML.
"""

import ast
import os
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbclient import NotebookClient
from nbconvert import HTMLExporter

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted((ROOT / "notebooks").glob("*.py"))
MAX_SECONDS = 300
each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)


def test_all_notebooks_exist():
    assert [script.stem[0] for script in SCRIPTS] == [*"12345678"]


@each
def test_notebooks_are_paired_and_stripped(script):
    committed = nbformat.read(script.with_suffix(".ipynb"), as_version=4)
    ours = jupytext.read(script)
    assert [(x.cell_type, x.source) for x in committed.cells] == [
        (x.cell_type, x.source) for x in ours.cells
    ], f"jupytext --to ipynb {script.relative_to(ROOT)}"
    code = [cell for cell in committed.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)


@each
def test_imports_succeed(script):
    """The whole notebook runs nightly."""
    tree = ast.parse(script.read_text())
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert imports
    exec(compile(ast.Module(imports, []), str(script), "exec"), {})


@each
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_notebooks_run(script):
    notebook = jupytext.read(script)
    folder = {"metadata": {"path": str(script.parent)}}
    env = {k: x for k, x in os.environ.items() if k != "JAX_DISABLE_MOST_OPTIMIZATIONS"}
    NotebookClient(notebook, timeout=MAX_SECONDS, resources=folder).execute(env=env)
    shown = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in shown)
    assert not any("Warning" in output.get("text", "") for output in shown)
    output = ROOT / "build" / "notebooks" / f"{script.stem}.html"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
