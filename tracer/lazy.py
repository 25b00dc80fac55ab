"""Public names, and packages of others, that are imported on first use, so that the command line starts quickly."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any


def lazily(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make a package's ``__getattr__`` and ``__dir__``::

        __getattr__, __dir__ = lazily(__name__, {"read_job": "tracer.job"})

    Args:
        package: its name.
        homes: module of each public name. ``module:name`` if the name differs there, ``module:`` if the public name is
            the module itself.
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


def late(name: str) -> ModuleType:
    """Return a replacement for a slow package, which is imported when one of its names is first used.

    From then on the replacement looks its names up without a Python call.
    """
    stand_in: Any = ModuleType(name)

    def first(attribute: str) -> Any:
        stand_in.__getattr__ = partial(getattr, import_module(name))
        return getattr(stand_in, attribute)

    stand_in.__getattr__ = first
    return stand_in  # type: ignore[no-any-return]


if TYPE_CHECKING:
    import sqlite3

    import fsspec
    import llvmlite
    import msgspec
    import networkx
    import numba
    import numpy
    import pandas
    import pyarrow
    import threadpoolctl
    import vl_convert
    from llvmlite import binding as llvm
    from pyarrow import compute, parquet
    from pyarrow import csv as arrow_csv
    from rich import box as rich_box
    from rich import console as rich_console
    from rich import markup as rich_markup
    from rich import progress as rich_progress
    from rich import table as rich_table
    from rich import text as rich_text
    from scipy import optimize, sparse, special
    from scipy.sparse import csgraph
    from sklearn import ensemble

_HOMES = {
    "llvm": "llvmlite.binding", "compute": "pyarrow.compute", "arrow_csv": "pyarrow.csv", "parquet": "pyarrow.parquet",
    **{f"rich_{name}": f"rich.{name}" for name in ("box", "console", "markup", "progress", "table", "text")},
    **{name: f"scipy.{name}" for name in ("optimize", "sparse", "special")}, "csgraph": "scipy.sparse.csgraph",
    "ensemble": "sklearn.ensemble"}
"""Real names of packages that are called differently here."""

__all__ = [
    "arrow_csv", "compute", "csgraph", "ensemble", "fsspec", "late", "lazily", "llvm", "llvmlite", "msgspec",
    "networkx", "numba", "numpy", "optimize", "pandas", "parquet", "pyarrow", "rich_box", "rich_console",
    "rich_markup", "rich_progress", "rich_table", "rich_text", "sparse", "special", "sqlite3", "threadpoolctl",
    "vl_convert",
]

if not TYPE_CHECKING:
    globals().update({name: late(_HOMES.get(name, name)) for name in __all__ if name not in globals()})
