"""``PythonCalls``: how often a program calls Python functions of its own and of its libraries, between two operations.

No name of an operation shows the host cost of a model's Python; the number of its calls does, even on a busy machine.
Python's own hook for profilers counts them in the thread that starts it. Calls that only watching makes are left out:
foretrace's functions, those that torch's modes need, and those that both call in the program's place.

::

    program     forward() → F.dropout() ─┐                 counted: 2
    watching                    __torch_function__() → F.dropout()      not again
"""

from __future__ import annotations

import sys
from pathlib import Path
from threading import get_ident
from types import CodeType, FrameType
from typing import Any

_OWN = str(Path(__file__).resolve().parent)
_FOR_TORCH = str(Path("tracer", "shape_only", "uncompiled.py"))
"""File whose functions replace torch's, and count as torch's."""
_OF_MODES = tuple(str(Path("torch", *parts)) for parts in (
    ("overrides.py",), ("utils", "_python_dispatch.py"), ("_subclasses",), ("_ops.py",), ("_library",), ("profiler",),
    ("autograd", "profiler.py")))
_UNCOUNTED = (str(Path("torch", "_jit_internal.py")), str(Path("torch", "compiler", "__init__.py")),
              str(Path("torch", "utils", "weak.py")), "weakref.py", "contextlib.py")
"""Files whose functions do almost nothing, and are called more often while a mode watches."""
_OF_SHARDS = str(Path("torch", "distributed", "tensor"))
"""Sharded tensors' own dispatch: it counts as the program's, even where a mode passes an operation on to it."""
_QUICK = sys.version_info < (3, 12)
"""Whether removing and restoring the hook costs nothing; from Python 3.12 on it visits all code again."""
_OF_HOOKS = "inner", str(Path("torch", "nn", "modules", "module.py"))
"""The function through which a module is called only if all modules have hooks."""


class PythonCalls:
    """Counts the calls of one thread between ``start`` and ``stop``.

    Attributes:
        count: calls since the last call of ``taken``.
    """

    def __init__(self) -> None:
        self.count = 0
        self._hidden = 0
        self._watching: dict[CodeType, bool] = {}
        self._uncounted: dict[CodeType, bool] = {}
        self._before: Any = None
        self._counting = False
        self._thread = 0

    def start(self) -> None:
        """Start counting from zero. Another Python hook is not called meanwhile; ``stop`` restores it."""
        if self._counting:
            return
        self._before, self._counting, self.count, self._thread = sys.getprofile(), True, 0, get_ident()
        sys.setprofile(self._called)

    def stop(self) -> None:
        """Stop counting; does nothing if not started."""
        if self._counting:
            sys.setprofile(None)
            if hasattr(self._before, "enable"):  # cProfile's hook is no function: only cProfile can restore it
                self._before.enable()
            elif self._before is not None:
                sys.setprofile(self._before)
            self._before, self._counting = None, False

    def taken(self) -> int:
        """Return the calls since the last call of this method."""
        found, self.count = self.count, 0
        return found

    def hide(self) -> None:
        """Do not count until ``show``: these calls are not the program's. It is no context manager, whose own Python
        would be counted."""
        self._hidden += 1
        if self._hidden == 1 and self._unhooks():
            sys.setprofile(None)

    def show(self) -> None:
        """Count again, once ``show`` was called as often as ``hide``."""
        self._hidden -= 1
        if not self._hidden and self._unhooks():
            sys.setprofile(self._called)

    def _unhooks(self) -> bool:
        """Return whether the hook is removed while hidden: most of a step's calls come from the watching."""
        return _QUICK and self._counting and get_ident() == self._thread

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        if event != "call" or self._hidden or self._is_uncounted(frame.f_code):
            return
        caller = frame.f_back
        if caller is None or _OF_SHARDS in frame.f_code.co_filename or not self._watches(caller.f_code):
            self.count += 1

    def _watches(self, code: CodeType) -> bool:
        found = self._watching.get(code)
        if found is None:
            file = code.co_filename
            own = file.startswith(_OWN) and not file.endswith(_FOR_TORCH)
            found = self._watching[code] = own or any(part in file for part in _OF_MODES)
        return found

    def _is_uncounted(self, code: CodeType) -> bool:
        found = self._uncounted.get(code)
        if found is None:
            found = self._uncounted[code] = (
                self._watches(code) or code.co_filename.endswith(_UNCOUNTED)
                or (code.co_name == _OF_HOOKS[0] and code.co_filename.endswith(_OF_HOOKS[1])))
        return found
