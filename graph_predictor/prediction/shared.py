"""``Shared``: results that several predictions need, made once: of one recording, one source, one cycle of steps.

Functions of plain values keep theirs with ``functools``; here results depend on objects too large to compare.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kernel_models.device import DeviceSpec
from tracer.errors import ForetraceError
from tracer.shape_only.devices import TracedDevice

KEPT = 6
"""Results of each kind that are kept: points of a sweep come grouped."""
_BY_VALUE = (int, float, str, tuple, dict, DeviceSpec, TracedDevice)

T = TypeVar("T")


class Shared:
    """The last few results of each kind, with what they were made of; refusals among them."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[tuple[object, ...], object]]] = {}

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
        kept = self._found.setdefault(kind, [])
        at = next((at for at, (known, _) in enumerate(kept) if _same(known, of)), None)
        if at is not None:
            kept.append(kept.pop(at))
            result = kept[-1][1]
            if isinstance(result, ForetraceError):
                raise result.with_traceback(None)
            return result  # type: ignore[return-value]
        del kept[:1 - most]
        try:
            made = make()
        except ForetraceError as error:
            kept.append((of, error))
            raise
        if keep(made):
            kept.append((of, made))
        return made


def _same(one: object, other: object) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one is other or (isinstance(one, _BY_VALUE) and type(one) is type(other) and one == other)
