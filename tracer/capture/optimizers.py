"""The optimizers of a script: whose steps are counted, and whether the others step along with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary


@dataclass(slots=True)
class _Seen:
    kind: str
    parameters: int
    steps: int = 0
    """Steps since the capture began."""
    in_steps: list[int] = field(default_factory=list)
    """The number of its own steps in each captured step; steps before it was first seen are left out."""
    first: int = 0
    """The captured step in which it was first seen."""


class Optimizers:
    """The optimizers that have made a step, numbered by their first one.

    Args:
        counted: the number of the one whose steps are counted.
    """

    def __init__(self, counted: int) -> None:
        self.seen: list[_Seen] = []
        self._counted = counted
        # Not kept alive: a script may make new ones for ever.
        self._numbers: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
        self._steps = 0
        self._pending: dict[int, int] = {}
        self._begun = False

    def note(self, optimizer: Any) -> bool:
        """An optimizer has made a step; whether it is the one that is counted."""
        number = self._numbers.get(optimizer)
        if number is None:
            number = self._numbers[optimizer] = len(self.seen)
            elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
            self.seen.append(_Seen(type(optimizer).__name__, elements, first=self._steps))
        if number == self._counted:
            self._begun = True
            return True
        if self._begun:
            self._pending[number] = self._pending.get(number, 0) + 1
        return False

    def end_step(self) -> None:
        """A captured step ends."""
        self._steps += 1
        for number, each in enumerate(self.seen):
            made = self._pending.get(number, 0) if number != self._counted else 1
            each.steps += made
            each.in_steps.append(made)
        self._pending.clear()

    @property
    def listed(self) -> str:
        """All of them, in words."""
        return ", ".join(f"{number} ({each.kind}, {each.parameters:,} parameters)"
                         for number, each in enumerate(self.seen))

    def facts(self) -> dict[str, Any]:
        """Return what ``context.json`` holds of them; nothing where there is one only."""
        if len(self.seen) < 2:
            return {}
        return {"optimizers": {
            "counted": self._counted, "note": self._note(),
            "seen": [{"class": each.kind, "parameters": each.parameters, "steps": each.steps} for each in self.seen]}}

    def _note(self) -> str:
        """A sentence if captured steps differ in the steps that other optimizers make in them; else empty."""
        others = [number for number, each in enumerate(self.seen) if number != self._counted and (
            len(set(each.in_steps)) > 1 or (each.first > 0 and any(each.in_steps)))]
        if not others:
            return ""
        counted = self.seen[self._counted]
        slowest = min(others, key=lambda number: self.seen[number].steps)
        one = self.seen[slowest]
        return (f"The steps are not alike: each of the {self._steps} since the first is one of optimizer "
                f"{self._counted} ({counted.kind}, {counted.parameters:,} parameters), while optimizer {slowest} "
                f"({one.kind}, {one.parameters:,} parameters) made {one.steps} meanwhile, not as many in each; "
                f"--optimizer {slowest} counts the steps of that one instead.")
