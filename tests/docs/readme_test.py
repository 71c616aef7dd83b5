"""Examples of the README and docs run, links are valid, and tables of mechanisms are complete."""

import ast
import re
from functools import partial
from typing import Any

import jax
import pytest
from flax import nnx

from heinsen_jax import attention
from heinsen_jax.attention.matrix_state import MatrixStateAttention
from heinsen_jax.study import load_study
from heinsen_jax.study.runner import run_study
from tests.docs.pages import (
    PAGES,
    README,
    README_TEXT,
    ROOT,
    table,
)

EXAMPLES = dict(re.findall(r"<!-- example: (\w+) -->\n```python\n(.*?)```", PAGES, re.DOTALL))
SHORT = "layer", "tiny"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.nightly] * (name not in SHORT)) for name in EXAMPLES],
)
def test_examples_run(name, capsys):
    defined: dict = {}
    exec(compile(EXAMPLES[name], name, "exec"), defined)
    if name == "tiny":
        defined["get_config"]()
    elif name not in ("keywords", "data", "study"):
        limit = 0.01 if name == "model" else 1e-4  # a loss, or the size of rounding errors
        assert float(capsys.readouterr().out) < limit


def test_the_example_of_a_study_is_checked_and_reported(tmp_path):
    environment = {"cpu": "a CPU", "backend": "cpu", "device": "cpu", "jax": "1"}
    environment |= {"commit": "abc", "uncommitted_changes": False}
    metrics = {name: 0.5 for name in ("accuracy_32", "accuracy_64", "accuracy_256")}
    row = {"metrics": metrics, "parameters": 1, "state_bytes": 1, "environment": environment}
    file = tmp_path / "induction_lengths.py"
    file.write_text(EXAMPLES["study"])
    run_study(load_study(file), tmp_path, lambda runs, folder: ((run, row) for run in runs))
    assert "9 of 9 runs" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "report.png").exists()


def test_links_are_valid():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md"), ROOT / "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_number_of_mechanisms_is_right():
    others = len(attention.names()) - 1
    assert f"It also has {others} other mechanisms" in README_TEXT


def test_the_table_of_mechanisms_names_all():
    rows = README.partition("| name and paper | mechanism | state | |\n")[2].partition("\n\n")[0]
    names = " ".join(row.split("|")[1] for row in rows.splitlines()[1:])
    assert sorted(re.findall(r"`(\w+)`", names)) == sorted(attention.names())


@pytest.mark.parametrize("name", attention.names())
def test_mechanisms_link_the_paper_that_their_layer_cites(name):
    cited = re.search(r"arXiv:(\d{4}\.\d{5})", attention.mechanism(name).__doc__ or "")
    cell = f"[`{name}`](https://arxiv.org/abs/{cited[1]})" if cited else f"`{name}`"
    assert cell in README


def test_results_that_are_not_finite_are_those_of_the_notebook(capsys):
    script = (ROOT / "notebooks/3_numbers_at_the_edge.py").read_text()
    first, last = script.index("import jax\n"), script.index("# ## The state of no tokens")
    with jax.numpy_rank_promotion("allow"):
        exec(compile(script[first:last], "notebook 3", "exec"), {})
    shown = capsys.readouterr().out.partition("rising by 1.0 nats per token\n")[2]
    simple, ours = re.findall(r"not finite: +(\d+) of 2048", shown)[:2]
    said = re.search(r"(\d+) of 2048 results are not finite with one maximum", README_TEXT)
    assert said
    assert int(said[1]) == pytest.approx(int(simple), rel=0.01)
    assert int(ours) == 0


def size_row(label: str) -> str:
    """Return the row of the table of sizes for a layer and its options, such as `gated=False`."""
    name, *options = re.findall("`(.*?)`", label)
    fields = (option.split("=") for option in options)
    config = {field: ast.literal_eval(value) for field, value in fields}
    build = partial(attention.build, name, model_dim=128, num_heads=4, **config)
    layer: Any = nnx.eval_shape(lambda: build(rngs=nnx.Rngs(0)))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(layer, nnx.Param)))
    state_bytes = f"{layer.state_size(1):,}"
    if layer.state_size(2) != layer.state_size(1):
        state_bytes += " per token"
    depths = f"{layer.key_depth} | {layer.value_depth}"
    return f"| {label} | {depths} | {parameters:,} | {state_bytes} |"


def test_sizes_of_layers_are_those_of_the_table():
    rows = {row.split("|")[1].strip(): row for row in table("sizes")}
    assert {label: size_row(label) for label in rows} == rows
    kinds = {name: attention.mechanism(name) for name in attention.names()}
    named = {f"`{x}`" for x, kind in kinds.items() if issubclass(kind, MatrixStateAttention)}
    assert named
    assert named <= rows.keys()


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 150


def test_examples_exist():
    needed = {"layer", "nnx", "linen", "data", "state", "keywords", "mechanism"}
    needed |= {"flax_nnx", "flax_linen", "tiny"}
    assert needed <= set(EXAMPLES)


def test_documented_failures_name_their_tests():
    """Every row of the table names existing tests."""
    section = (ROOT / "docs/pods.md").read_text().split("## Failures and recovery\n")[1]
    rows = [row for row in section.splitlines() if row.startswith("| ") and "**" not in row]
    assert len(rows) > 20
    for row in rows[1:]:
        named = re.findall(r"`(tests/\S+\.py)::(\w+)`", row)
        assert named, row
        for file, test in named:
            assert f"def {test}(" in (ROOT / file).read_text(), test
