"""The processor cores that a process may use, and safe ways to start Python processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_NOT_FROM_HERE = ("import sys; sys.path[:] = filter(None, sys.path); import runpy; name = sys.argv.pop(1); "
                  "runpy.run_module(name, run_name='__main__', alter_sys=True)")
"""Does what -P of Python 3.11 does: removes the current directory, an empty entry, before any import."""
RUN_MODULE = (sys.executable, "-P", "-m") if sys.version_info >= (3, 11) else (sys.executable, "-c", _NOT_FROM_HERE)
"""Command before a module's name that runs it, so that no module of the current directory replaces another."""


@contextmanager
def away_from_here() -> Iterator[None]:
    """Use the root directory while libraries start Python processes: they seek modules in their start directory."""
    here = os.getcwd()
    os.chdir(os.sep)
    try:
        yield
    finally:
        os.chdir(here)


@contextmanager
def safe_paths() -> Iterator[None]:
    """Keep Python processes started in the block from seeking modules in their start directory (Python 3.11 on)."""
    before = os.environ.get("PYTHONSAFEPATH")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["PYTHONSAFEPATH"]
        else:
            os.environ["PYTHONSAFEPATH"] = before


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
