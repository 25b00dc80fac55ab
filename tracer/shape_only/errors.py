"""Errors of a trace by shapes alone, with the user's own line and the remedy."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any

from tracer.errors import ForetraceError, reason_of

_OWN = Path(__file__).resolve().parents[1]
_WORKLOADS = _OWN / "workloads"
_WITHOUT_GPU = ("not linked with support for cuda", "not compiled with CUDA enabled", "Found no NVIDIA driver",
                "No CUDA GPUs are available")
"""PyTorch's messages when a program requests a GPU and there is none; a trace for a GPU never raises them."""

MOST_ELEMENTS = 1 << 20
"""Most elements of a mask. Larger tensors are data or weights: a mask of 16 sequences of 256 tokens is smaller."""


class ShapeOnlyError(ForetraceError):
    """A step cannot be traced by shapes alone."""


class UnknownSizeError(ShapeOnlyError):
    """A function has no argument with a size's name."""


def explained(error: BaseException) -> ShapeOnlyError | None:
    """Return the error as one sentence with the user's line and the remedy; None if it is not about shapes."""
    from torch._subclasses import fake_tensor

    where = user_line(error.__traceback__)
    kinds = {type(e).__name__: e for e in _chain(error)}
    for name in ("DataDependentOutputException", "DynamicOutputShapeException", "GuardOnDataDependentSymNode"):
        if name in kinds:
            operator = getattr(kinds[name], "func", None)
            what = "reads a tensor's values" if name == "DataDependentOutputException" else (
                "gives a tensor whose shape depends on values")
            way = "what share of them such masks select" if what.startswith("gives") else (
                "what share of their range values fill whose ends an operator tells, as clamp and argmax do")
            return ShapeOnlyError(
                f"{where} {what} ({operator}), which a trace by shapes alone does not have (it does of tensors made of "
                f"constants alone, of at most {MOST_ELEMENTS:,} elements): keep the decision on the "
                "device (torch.where, masks, index_select with fixed sizes), or leave .item(), print and logging of "
                f"losses out of the traced step, or say {way} (--selected 0.5; in Python selected=0.5).")
    if any(text in str(e) for e in _chain(error) for text in _WITHOUT_GPU):
        return ShapeOnlyError(
            f"{where} asks for a GPU, and the step is traced for a device without one: name a GPU with --device, or "
            'let the program choose, as in "cuda" if torch.cuda.is_available() else "cpu".')
    if any(isinstance(e, RuntimeError) and ".numpy() is not supported" in str(e) for e in _chain(error)):
        return ShapeOnlyError(
            f"{where} reads a tensor's values (.numpy()), which a trace by shapes alone does not have: leave numpy, "
            "print and logging of losses out of the traced step.")
    unsupported = next((e for e in _chain(error) if isinstance(e, fake_tensor.UnsupportedOperatorException)), None)
    if unsupported is None:
        unsupported = next((e for e in _chain(error) if isinstance(e, NotImplementedError) and (
            "fake" in str(e).lower() or "meta" in str(e).lower())), None)
    if unsupported is None and (lacking := _lacking(error)) is not None:
        unsupported = lacking
    if unsupported is not None:
        operator = _operator(unsupported)
        return ShapeOnlyError(
            f"{where} calls {operator}, which has no fake kernel, so that its output's shape is unknown: register one "
            f"with @torch.library.register_fake(\"{operator}\"), a function that returns empty tensors of the right "
            "shape and dtype.")
    return None


def unexplained(error: BaseException) -> ShapeOnlyError:
    """Return the error for any other failure of the user's function, with its line."""
    return ShapeOnlyError(f"{user_line(error.__traceback__)} failed while it was traced by shapes alone: "
                          f"{type(error).__name__}: {reason_of(error, 300)} (--debug shows where).")


def user_line(trace: TracebackType | None) -> str:
    """Return ``file.py:12 (`the line`)`` of the innermost frame that belongs neither to torch, foretrace nor Python
    itself; the line of an installed library that it called is added."""
    return _users(traceback.extract_tb(trace))


def caller_line() -> str:
    """Return the user's line in the code that runs now."""
    return _users(traceback.extract_stack())


def function_line(function: Any) -> str:
    """Return ``file.py:12 (`the line`)`` of a function's definition; its name if it is no Python function."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return getattr(function, "__name__", type(function).__name__)
    line = linecache.getline(code.co_filename, code.co_firstlineno).strip()
    return f"{code.co_filename}:{code.co_firstlineno}" + (f" (`{line[:80]}`)" if line else "")


def _users(frames: traceback.StackSummary) -> str:
    """Return the user's innermost line, and the library's line that it called."""
    users = next((frame for frame in reversed(frames) if _is_users(frame.filename)), None)
    inside = next((frame for frame in reversed(frames) if _is_librarys(frame.filename)), None)
    if users is None:
        return "The traced function" if inside is None else _line(inside, inside.filename)
    found = _line(users, _shown(users.filename))
    if inside is None or frames.index(inside) < frames.index(users):
        return found
    return f"{found}, in {_line(inside, inside.filename.rpartition('site-packages/')[2])},"


def _shown(filename: str) -> str:
    """Return a file's path relative to the current directory, if it lies there."""
    path, here = Path(filename), Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else filename


def _line(frame: traceback.FrameSummary, name: str) -> str:
    code = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return f"{name}:{frame.lineno}" + (f" (`{code[:80]}`)" if code else "")


def _is_librarys(filename: str) -> bool:
    """Return whether a file belongs to an installed library other than PyTorch."""
    parts = Path(filename).parts
    return "site-packages" in parts and parts[parts.index("site-packages") + 1] not in ("torch", "functorch")


def _is_users(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    path = Path(filename).resolve()
    if _WORKLOADS in path.parents:
        return True
    roots = [_OWN, Path(sys.base_prefix) / "lib", Path(sys.prefix) / "lib"]
    return not any(root in path.parents for root in roots) and "site-packages" not in path.parts


def _chain(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _lacking(error: BaseException) -> BaseException | None:
    """Return the error of an operator without a kernel for fake tensors, which only torch's message identifies."""
    for one in _chain(error):
        text = str(one)
        if isinstance(one, RuntimeError | NotImplementedError) and (
                "Meta tensors" in text or "fake impl" in text or "meta kernel" in text or "'Meta' backend" in text):
            return one
    return None


def _operator(error: BaseException) -> str:
    """Return ``library::name`` of the operator in an error."""
    text = str(getattr(error, "func", None) or error)
    found = re.search(r"(\w+)::(\w+)", text) or re.search(r"\b(\w+)\.(\w+)(?:\.\w+)?\b", text)
    return f"{found.group(1)}::{found.group(2)}" if found else "an operator"
