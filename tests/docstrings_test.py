"""Public docstrings: examples run, and all arguments are documented."""

import ast
import doctest
import inspect
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import studies
from heinsen_jax import attention, config, generate, goom, models, ops
from heinsen_jax.interop import hub, torch, transformers

ROOT = Path(__file__).resolve().parents[1]
PLACES = (attention, goom, models, ops, generate, studies, config, torch, hub, transformers)
SEVERAL_DEVICES = {"over_context", "sharded_log_attention"}
"""Names used by the examples; tests/multi_device covers the others."""


def public(place: Any) -> dict[str, Any]:
    """Return the functions and classes of a package, or those defined in a module."""
    own = [name for name, x in vars(place).items() if module(x) == place.__name__]
    found = {name: getattr(place, name) for name in getattr(place, "__all__", own)}
    return {name: x for name, x in found.items() if callable(x)}


def module(x: Any) -> str:
    return getattr(x, "__module__", "")


OBJECTS = {
    f"{module(x)}.{name}": (place, x) for place in PLACES for name, x in public(place).items()
}


def examples(name: str) -> list[tuple[str, str]]:
    """Return the docstrings with examples of an object and of its public methods."""
    _, x = OBJECTS[name]
    whole = [(name, x)]
    if inspect.isclass(x):
        methods = [(key, method) for key, method in vars(x).items() if inspect.isroutine(method)]
        whole += [(f"{name}.{key}", method) for key, method in methods if not key.startswith("_")]
    found = [(key, inspect.getdoc(one) or "") for key, one in whole]
    return [(key, doc) for key, doc in found if ">>>" in doc]


def few_or_nightly() -> list:
    """Return the names of all objects with examples. Ops, except the first, and `goom` run
    nightly, since each has an oracle in its tests."""
    few = f"{ops.__name__}.log_attention", f"{ops.__name__}.softmax"
    shown = [name for name in OBJECTS if examples(name)]
    places = f"{ops.__name__}.", f"{goom.__name__}."
    is_long = {n for n in shown if n.startswith(places) and not n.startswith(few)}
    return [pytest.param(n, marks=[pytest.mark.nightly] * (n in is_long)) for n in shown]


@pytest.mark.parametrize("name", few_or_nightly())
def test_examples_run(name):
    place, _ = OBJECTS[name]
    names = {"jax": jax, "jnp": jnp, "np": np, "nnx": nnx} | public(attention) | public(place)
    runner = doctest.DocTestRunner(verbose=False)
    said: list[str] = []
    for key, doc in examples(name):
        test = doctest.DocTestParser().get_doctest(doc, dict(names), key, None, None)
        runner.run(test, out=said.append)
    assert runner.tries > 0
    assert not runner.failures, "".join(said)


def test_every_op_has_an_example():
    functions = {n for n, x in public(ops).items() if not inspect.isclass(x)} - SEVERAL_DEVICES
    firsts = {"LogAttentionState", "build", "names", "LanguageModel", "load_config"}
    firsts |= {"generate", "complete"}
    shown = {name.rpartition(".")[2] for name in OBJECTS if examples(name)}
    assert shown >= functions | firsts


@pytest.mark.parametrize("name", OBJECTS)
def test_public_docstrings_describe_all_arguments(name):
    _, x = OBJECTS[name]
    doc = inspect.getdoc(x)
    assert doc, "it has no docstring"
    section = re.search(r"^Args:\n((?:[ ].*\n|\n)+)", f"{doc}\n", re.MULTILINE)
    if section is None:
        return
    heads = re.findall(r"^  (\w[\w, ]*): ", section[1], re.MULTILINE)
    described = [argument for head in heads for argument in head.split(", ")]
    parameters = inspect.signature(x.__init__ if inspect.isclass(x) else x).parameters
    assert sorted(described) == sorted(parameters.keys() - {"self"})


THIRD_PERSON = {"Adds", "Checks", "Compares", "Computes", "Continues", "Resolves", "Returns"}
THIRD_PERSON |= {"Trains", "Uses", "Writes", "Yields"}


@pytest.mark.parametrize("folder", ["heinsen_jax", "benchmarks", "configs", "docs", "tests"])
def test_docstrings_begin_with_an_imperative_or_a_noun(folder):
    found = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                first = (ast.get_docstring(node) or " ").split(" ")[0]
                is_class = isinstance(node, ast.ClassDef) or getattr(node, "name", "") == "__init__"
                if first in THIRD_PERSON or (is_class and first in ("Return", "Yield")):
                    found.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {first}")
    assert not found
