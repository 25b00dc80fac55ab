"""One file a family of operations; each registers what it knows when loaded.

A new family is a file here, which ``load`` finds, and a member of ``op_call.Family`` with its dimensions. Its kernels
are priced by bytes and arithmetic until a file of ``heuristics`` registers how they work (``heuristics.work.work_of``).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules


@cache
def load() -> None:
    """Import every family once, so that it registers itself; a thread that asks meanwhile waits for the imports."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
