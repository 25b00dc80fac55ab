"""Public names of a package that are imported on first use, so that starting the command line stays quick."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__``::

        __getattr__, __dir__ = lazily(__name__, {"read_job": "tracer.job"})

    Args:
        package: its name.
        homes: where each public name is: a module that has it, ``module:name`` where it is called otherwise there, or
            ``module:`` where it is that module.
    """

    def get(name: str) -> Any:
        if name in homes:
            module, colon, there = homes[name].partition(":")
            found = import_module(module)
            return found if colon and not there else getattr(found, there or name)
        if name.startswith("__"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(homes))}")

    def names() -> list[str]:
        there = vars(sys.modules[package])
        return sorted({*homes, *there.get("__all__", ()), *(name for name in there if name.startswith("__"))})

    return get, names
