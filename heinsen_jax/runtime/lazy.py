"""Names of a package that are imported at first use."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any


def attributes(package: str, names: Sequence[str], modules: Sequence[str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
      package: the package, `__name__`.
      names: its names, `__all__`.
      modules: its modules that define them, in the order in which they are searched: fast imports
        first.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        imported = (importlib.import_module(f"{package}.{module}") for module in modules)
        return next(getattr(module, name) for module in imported if hasattr(module, name))

    return get
