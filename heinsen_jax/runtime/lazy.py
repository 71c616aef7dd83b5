"""Names of a package that are imported at first use."""

from collections.abc import Callable, Sequence
from typing import Any

from heinsen_jax.errors import MissingExtra, extra_module


def attributes(package: str, names: Sequence[str], modules: Sequence[str]) -> Callable[[str], Any]:
    """Return the `__getattr__` of a package.

    Args:
      package: the package, `__name__`.
      names: its names, `__all__`.
      modules: its modules that define them, in the order in which they are searched: fast imports
        first. One that needs a missing extra is left out if another one defines the name.
    """

    def get(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        missing = None
        for module in modules:
            try:
                imported = extra_module(f"{package}.{module}")
            except MissingExtra as error:
                missing = missing or error
                continue
            if hasattr(imported, name):
                return getattr(imported, name)
        raise missing or AttributeError(f"no module of {package!r} defines {name!r}")

    return get
