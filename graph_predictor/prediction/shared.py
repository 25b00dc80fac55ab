"""``Shared``: what scenarios of one recording have in common, so that many predictions from it make it once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kernel_models.device import DeviceSpec

KEPT = 4
"""Results of each kind that are kept: points of a sweep come grouped."""

T = TypeVar("T")


class Shared:
    """The last few results of each kind, with what they were made of."""

    def __init__(self) -> None:
        self._found: dict[str, list[tuple[tuple[object, ...], object]]] = {}

    def once(self, kind: str, of: tuple[object, ...], make: Callable[[], T]) -> T:
        """``make()``, or what it gave before for the same ``of``; nobody may change it.

        Args:
            kind: names the result.
            of: everything it depends on: numbers, texts, devices and dictionaries by their values, else by identity.
        """
        kept = self._found.setdefault(kind, [])
        for at, (known, result) in enumerate(kept):
            if len(known) == len(of) and all(map(_same, known, of)):
                kept.append(kept.pop(at))
                return result  # type: ignore[return-value]
        made = make()
        kept.append((of, made))
        del kept[:-KEPT]
        return made


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, int | float | str | dict | DeviceSpec) and type(one) is type(other)
                            and one == other)
