"""Public names of a package that are loaded when they are first used.

    if TYPE_CHECKING:
        from taskguard.api import connect as connect
    else:
        __all__, __getattr__, __dir__ = lazy_names(__name__, {"taskguard.api": "connect"})

Type checkers read the imports and refuse every other name. The running program reads the table.
A test compares the two.

Guarantees: importing the package loads no module of the table. A driver that a name needs and that
is not installed is named with its extra.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["lazy_names"]


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__all__`, `__getattr__` and `__dir__` of a package.

    Args:
        package: its `__name__`.
        homes: names, separated by blanks, by the module that defines them. The names of the
            package itself are modules in it.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        home = home_of.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from taskguard.drivers import extras_named

        with extras_named(f"{package}.{name}"):
            if home == package:
                value: Any = importlib.import_module(f"{package}.{name}")
            else:
                value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)  # the next use finds it there
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return sorted(home_of), load, names
