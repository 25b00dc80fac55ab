"""One file a family of operations; each registers what it knows when loaded.

A new family is a file here, which ``load`` finds, and a member of ``op_call.Family``. Its file may also register how
its kernels work (``heuristics.work.work_of``); without that they are priced by their bytes and arithmetic.
Efficiencies, features of learned models and classes of corrections have defaults for a family they do not know;
``calibrate`` measures families that have a benchmark.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pkgutil import iter_modules


@cache
def load() -> None:
    """Import every family once, so that it registers itself; other threads wait until the imports are done."""
    for module in iter_modules(__path__):
        import_module(f"{__name__}.{module.name}")
