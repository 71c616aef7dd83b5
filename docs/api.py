"""Makes the reference of the public functions and classes out of their docstrings.

    python docs/api.py [FOLDER]

Pages of HTML, in build/api by default. Whatever the tool warns of is an error.
"""

import importlib
import inspect
import sys
import warnings
from pathlib import Path
from typing import get_type_hints

import pdoc.extract
import pdoc.render
import pydantic

PUBLIC = ("attention", "ops", "models", "generate", "interop", "config", "study")
"""Parts of the package, with the modules that they show."""
SPECS = (*(f"heinsen_jax.{part}" for part in PUBLIC), r"!heinsen_jax\.ops\.")
"""Some ops have the name of their module: these are shown as functions, and not as modules."""


def show_fields(module: str) -> None:
    """Configurations and named tuples get constructors with the names and types of their fields."""
    for cls in vars(importlib.import_module(module)).values():
        if not inspect.isclass(cls):
            continue
        if pydantic.dataclasses.is_pydantic_dataclass(cls):
            fields = inspect.signature(cls).parameters.values()
            itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            vars(cls.__init__)["__signature__"] = inspect.Signature([itself, *fields])
        elif issubclass(cls, tuple):
            cls.__new__.__annotations__ = get_type_hints(cls)


def main(folder: Path) -> None:
    for part in PUBLIC:  # pdoc forbids modules that it imports itself to start processes
        importlib.import_module(f"heinsen_jax.{part}")
    warnings.simplefilter("error")
    modules = pdoc.extract.walk_specs(SPECS)
    for module in modules:
        show_fields(module)
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*SPECS, output_directory=folder)
    print(f"{len(modules)} pages in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/api"))
