"""Numbers in place of those that a program reads from data, such as a logged loss.

    total += loss.item()          # goes on with a stand-in
    correct += hits.sum().item()
    if loss.item() > best: …      # refused: the trace cannot know

They may be added, averaged and printed, but not compared: anything that decides what the step does raises
``ShapeOnlyError`` with the program's line. Checks of ``math`` treat them as ordinary numbers (``math.isfinite`` of one
is true). A stand-in for an integer is no ``int``, because PyTorch would silently use its value as a size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from tracer.shape_only.errors import ShapeOnlyError, caller_line

VALUE = 1
"""Value of a stand-in where C code reads it."""
READ = ("The program reads numbers of its data, first at {}: they are read here too, and nothing that the step does is "
        "decided by them.")
_KEEPING = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_DECIDING = ("lt", "le", "gt", "ge", "eq", "ne")


def _refused(*_: Any) -> NoReturn:
    raise ShapeOnlyError(
        f"{caller_line()} decides by a number that it read from a tensor's values (.item()), which a trace by shapes "
        "alone does not have: keep the decision on the device (torch.where, masks), or leave it out of the traced "
        "step; numbers that are only added up, averaged and logged may stay.")


class OfData:
    """A number that comes from data; see the module's text."""

    def __float__(self) -> float:
        return float(VALUE)

    def __repr__(self) -> str:
        return str(VALUE)

    def _same(self, *_: Any) -> Any:
        return self

    def __format__(self, spec: str) -> str:
        return format(VALUE, spec) if isinstance(self, CountOfData) else format(float(VALUE), spec)

    __neg__ = __pos__ = __abs__ = _same
    __bool__ = __int__ = __trunc__ = __floor__ = __ceil__ = _refused


class NumberOfData(OfData, float):
    """A fraction that comes from data: a loss, a norm."""


class CountOfData(OfData):
    """An integer that comes from data: hits, tokens."""

    __index__ = _refused


def _keeping(name: str) -> Callable[[Any, Any], Any]:
    def result(self: OfData, other: Any) -> Any:
        if not isinstance(other, int | float | CountOfData):
            return NotImplemented
        whole = isinstance(self, CountOfData) and isinstance(other, int | CountOfData) and "truediv" not in name
        return CountOfData() if whole else NumberOfData(VALUE)

    return result


for _name in _KEEPING:
    for _side in ("__", "__r"):
        setattr(OfData, f"{_side}{_name}__", _keeping(_name))
for _name in _DECIDING:
    setattr(OfData, f"__{_name}__", _refused)
setattr(OfData, "__round__", lambda self, digits=None: _refused() if digits is None else self)  # noqa: B010 - types
OfData.__hash__ = object.__hash__  # type: ignore[method-assign]


def stand_in(number: float | int) -> OfData:
    """Return the stand-in for a number's kind: a fraction or an integer."""
    return CountOfData() if isinstance(number, int) else NumberOfData(VALUE)
