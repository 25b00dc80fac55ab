"""``trace_script``: the step of a function in a user's file."""

from __future__ import annotations

import inspect
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tracer.graph import ExecutionGraph
from tracer.shape_only.devices import TracedDevice
from tracer.shape_only.errors import ShapeOnlyError, UnknownSizeError
from tracer.shape_only.trace import trace_step


def trace_script(target: str, device: str | TracedDevice = "h200-sxm", *, world_size: int | None = None, rank: int = 0,
                 arguments: Mapping[str, int] | None = None, selected: float | None = None) -> ExecutionGraph:
    """Trace the step that ``SCRIPT.py:FUNCTION`` returns; arguments as ``trace_step``.

    ``arguments`` are passed to the function by name: sizes, as in ``def build(batch=32)``.

    The file runs inside the trace, as a module (``__name__`` is not ``"__main__"``), so that what it makes on import
    is traced too and its decorators see the GPU that is not there. It finds its own path as the command line,
    without arguments: ones that it parses take their defaults. It must not have run in this process before
    (``trace_apart``).

    Raises:
        UnknownSizeError: the function takes no such argument.
        ShapeOnlyError: there is no such file or function, or as ``trace_step``.
    """
    path, _, name = target.rpartition(":")
    if not path or not name:
        raise ShapeOnlyError(f"{target!r} names no function; write it as script.py:function.")
    file = Path(path)
    if not file.is_file():
        raise ShapeOnlyError(f"{path} does not exist; check the path.")

    def build() -> Any:
        before, arguments_before = list(sys.path), sys.argv
        sys.path.insert(0, str(file.resolve().parent))
        sys.argv = [str(file)]
        try:
            found = runpy.run_path(str(file), run_name=file.stem)
            function = found.get(name)
            if not callable(function):
                there = ", ".join(key for key, value in found.items() if callable(value) and not key.startswith("_")
                                  and getattr(value, "__module__", "") == file.stem)
                raise ShapeOnlyError(f"{path} has no function {name!r}" + (f"; it has {there}." if there else "."))
            for argument in arguments or ():
                _check_takes(target, function, argument)
            step = function(**(arguments or {}))
        finally:
            sys.path[:], sys.argv = before, arguments_before
        if not callable(step):
            raise ShapeOnlyError(
                f"{target} returned {type(step).__name__} where the step was expected: let it build model, optimizer "
                "and data, and return a function without arguments that does one training step.")
        return step

    return trace_step(build, device, world_size=world_size, rank=rank, source=target, selected=selected)


def _check_takes(target: str, function: Any, argument: str) -> None:
    """Raise ``UnknownSizeError`` if a function takes no argument of a name."""
    parameters = inspect.signature(function).parameters
    if argument not in parameters and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        there = f"it takes {', '.join(parameters)}" if parameters else "it takes none"
        raise UnknownSizeError(f"{target} takes no argument {argument!r} ({there}); let it take its sizes by name, as "
                               f"in def {target.rpartition(':')[2]}({argument}=32).")
