"""``Shared``: results that several predictions need, made once: of one recording, one source, one cycle of steps.

Functions of plain values keep theirs with ``functools``; here results depend on objects too large to compare.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import count
from typing import TypeVar

from kernel_models.device import DeviceSpec
from tracer.errors import ForetraceError
from tracer.shape_only.devices import TracedDevice

KEPT = 6
"""Results of each kind that are kept: points of a sweep come grouped."""
_PLAIN = frozenset({float, str})
_BY_VALUE = frozenset({dict, DeviceSpec, TracedDevice})
_MOST_NUMBERED = 512

T = TypeVar("T")


class Shared:
    """The last few results of each kind, with what they were made of; refusals among them."""

    def __init__(self) -> None:
        self._found: dict[str, OrderedDict[Hashable, tuple[object, object]]] = {}
        self._numbered: OrderedDict[int, object] = OrderedDict()
        self._numbers = count()

    def once(self, kind: str, of: tuple[object, ...], make: Callable[[], T], *,
             keep: Callable[[T], bool] = lambda result: True, most: int = KEPT) -> T:
        """Return ``make()``, or its result for the same ``of`` before; nobody may change it.

        Args:
            kind: names the result.
            of: everything it depends on: numbers, texts, devices, tuples and dictionaries by their values, else by
                identity.
            make: makes it. A ``ForetraceError`` that it raises is raised again without trying.
            keep: whether a result is to be kept.
            most: results that are kept of this kind.
        """
        kept = self._found.setdefault(kind, OrderedDict())
        key = self._key(of)
        if key in kept:
            kept.move_to_end(key)
            result = kept[key][1]
            if isinstance(result, ForetraceError):
                raise result.with_traceback(None)
            return result  # type: ignore[return-value]
        while len(kept) >= most:
            kept.popitem(last=False)
        try:
            made = make()
        except ForetraceError as error:
            kept[key] = of, error
            raise
        if keep(made):
            kept[key] = of, made
        return made

    def _key(self, value: object) -> Hashable:
        """Return what values that count as the same have in common. The identity of an object is good as long as its
        result is kept, which keeps the object too."""
        kind = type(value)
        if kind is tuple:
            return tuple(map(self._key, value))  # type: ignore[call-overload]
        if kind in _PLAIN:
            return value
        if kind is int or kind is bool:
            return kind, value  # which is no other number that is equal to it
        return (self._number(value) if kind in _BY_VALUE else id(value),)

    def _number(self, value: object) -> int:
        """Return a number of a value that cannot be hashed: that of the one before that is equal, or a new one."""
        for number, known in reversed(self._numbered.items()):
            if known is value or (type(known) is type(value) and known == value):
                return number
        if len(self._numbered) >= _MOST_NUMBERED:
            self._numbered.popitem(last=False)
        number = next(self._numbers)
        self._numbered[number] = value
        return number
