"""The package without extras, in processes without all other libraries."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from heinsen_jax.errors import EXTRAS

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PROVIDERS = importlib.metadata.packages_distributions()

HIDE = """if True:
    import json, sys
    class Hiding:
        def __init__(self, finder):
            self.finder = finder
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] not in hidden:
                return self.finder.find_spec(name, path, target)
        def __getattr__(self, name):
            return getattr(self.finder, name)
    hidden = json.loads(sys.argv.pop(1))
    sys.meta_path[:] = map(Hiding, sys.meta_path)
"""
LIBRARY = """if True:
    from pathlib import Path
    import jax, jax.numpy as jnp
    from flax import nnx
    import heinsen_jax.config, heinsen_jax.interop.torch
    from heinsen_jax import attention, generate, ops, runs, sharding
    from heinsen_jax.models import LanguageModel, LanguageModelConfig
    from heinsen_jax.pytrees import flatten_with_names
    from heinsen_jax.runs.load import load_model
    from heinsen_jax.runs.weights import save_weights
    build = attention.build("log", model_dim=8, num_heads=2, rngs=nnx.Rngs(0))
    config = LanguageModelConfig(vocab_size=9, model_dim=8, num_layers=1, num_heads=2)
    model = LanguageModel(config, rngs=nnx.Rngs(0))
    new = generate.generate(model, jnp.array([1, 2, 3]), 4, top_k=1)
    assert new.shape == (4,)
    folder = Path(sys.argv[1])
    save_weights(folder, flatten_with_names(nnx.state(model)), step=3)
    (folder / "config.json").write_text(json.dumps(
        {"model": {"vocab_size": 9, "model_dim": 8, "num_layers": 1, "num_heads": 2},
         "data": {"tokenizer": "gpt2"}, "optimizer": {}}))
    loaded, step = load_model(folder)
    assert step == 3
    assert (generate.generate(generate.Engine(loaded), [1, 2, 3], 4, top_k=1) == new).all()
    try:
        from heinsen_jax.training import train
    except ImportError as error:
        print(json.dumps([str(error), [x for x in sys.modules if x.startswith("heinsen_jax")]]))
"""
COMMANDS = """if True:
    import contextlib, runpy
    for line in sys.stdin:
        sys.argv = line.split()
        with contextlib.suppress(SystemExit):
            runpy.run_module(sys.argv[0], run_name="__main__")
"""
MISSING = (
    r"No module named '\w+'; install the extra, pip install 'heinsen_jax\[{0}\]', "
    r"or in a clone pip install -e '\.\[{0}\]'"
)


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def installed_with(lines: list[str]) -> set[str]:
    """Distributions that pip installs for requirements."""
    extras_of: dict[str, set[str]] = {}
    waiting = [Requirement(line) for line in lines]
    while waiting:
        wanted = waiting.pop()
        name, extras = normal(wanted.name), wanted.extras or {""}
        if extras <= extras_of.setdefault(name, set()):
            continue
        extras_of[name] |= extras
        further = map(Requirement, importlib.metadata.requires(name) or ())
        for x in further:
            if not x.marker or any(x.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(x)
    return {*extras_of}


@pytest.fixture(scope="module")
def slim() -> set[str]:
    """Distributions of an installation without extras."""
    return installed_with(PROJECT["dependencies"])


def run(slim: set[str], program: str, *arguments: str, lines: str = ""):
    """Run a program in which modules of other distributions cannot be imported."""
    providers = {name: {*map(normal, each)} for name, each in PROVIDERS.items()}
    hidden = [x for x, each in providers.items() if not each & {*slim, "heinsen-jax"}]
    assert {"grain", "huggingface_hub", "tiktoken", "tokenizers"} < {*hidden}
    return subprocess.run(
        [sys.executable, "-c", HIDE + program, json.dumps(hidden), *arguments],
        cwd=ROOT,
        input=lines,
        capture_output=True,
        text=True,
    )


def imports(paths) -> set[str]:
    """Top-level modules that files import, by statement or `extra_module`."""
    names = set()
    for path in paths:
        for node in ast.walk(ast.parse(Path(path).read_text())):
            match node:
                case ast.Import():
                    names |= {alias.name for alias in node.names}
                case ast.ImportFrom(module=str(name)):
                    names.add(name)
                case ast.Call(func=ast.Name("extra_module"), args=[ast.Constant(name)]):
                    names.add(name)
    return {name.partition(".")[0] for name in names}


def provided(distribution: str) -> set[str]:
    return {x for x, each in PROVIDERS.items() if distribution in map(normal, each)}


@pytest.fixture(scope="module")
def without_extras(slim, tmp_path_factory) -> tuple[Path, str, list[str]]:
    """Run `LIBRARY`; return the folder of its model, its message, and the imported modules."""
    folder = tmp_path_factory.mktemp("model")
    done = run(slim, LIBRARY, str(folder))
    assert done.returncode == 0, done.stderr
    return folder, *json.loads(done.stdout)


def test_a_model_generates_without_extras(without_extras):
    """And the trainer names its extra."""
    assert re.fullmatch(MISSING.format("train"), without_extras[1])


def test_dependencies_are_imported_without_extras(without_extras):
    files = [ROOT / f"{name.replace('.', '/')}.py" for name in without_extras[2]]
    imported = imports(x if x.exists() else x.with_suffix("") / "__init__.py" for x in files)
    for line in PROJECT["dependencies"]:
        assert provided(normal(Requirement(line).name)) & imported, line


# In one process, the first command may initialize jax.distributed.
TRAIN = {"heinsen_jax.train --config quickstart": "train"}
OTHERS = {
    "heinsen_jax.linearize --model nowhere --workdir nowhere": "train",
    "heinsen_jax.generate --workdir MODEL --prompt x": "train",
    "heinsen_jax.chat --workdir MODEL": "train",
    "heinsen_jax.evaluate --workdir nowhere": "train",
    "heinsen_jax.data.prepare stdlib --output nowhere": "train",
    "heinsen_jax.data.train_tokenizer stdlib --output nowhere": "train",
    "heinsen_jax.interop.transformers import owner/name --workdir nowhere": "train",
    "heinsen_jax.interop.hub": "hub",
    "heinsen_jax.interop.harness": "harness",
}


@pytest.mark.parametrize("commands", [TRAIN, OTHERS], ids=["train", "others"])
def test_commands_name_the_missing_extra(slim, commands, without_extras):
    lines = "\n".join(commands).replace("MODEL", str(without_extras[0]))
    done = run(slim, COMMANDS, lines=lines)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == len(commands), done.stderr
    for line, extra in zip(lines, commands.values(), strict=True):
        assert re.fullmatch(rf"error: {MISSING.format(extra)}", line)


INDIRECT = {"gcsfs", "sqlalchemy", "alembic"}
"""Distributions that other libraries import for the package."""


def test_extras_have_what_their_part_imports():
    extras = PROJECT["optional-dependencies"]
    files = (x for part in ("heinsen_jax", "studies") for x in (ROOT / part).rglob("*.py"))
    imported = imports(files) | {"mlflow", "trackio", "wandb"}  # trackers, by their names
    for extra, modules in EXTRAS.items():
        declared = {normal(Requirement(line).name) for line in extras[extra]}
        declared -= {"heinsen-jax", *INDIRECT}
        providers = {x: {*map(normal, PROVIDERS.get(x, [x]))} for x in modules}
        assert all(each & declared for each in providers.values()), extra
        assert declared <= set().union(*providers.values()), extra
        assert {*modules} <= imported, extra
