"""Sources of a run's items: a plan's list in order, or a source that chooses each item by the measurements so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tracer.campaign.items import Item, expand, parts
from tracer.campaign.plan import CampaignError, Plan
from tracer.campaign.results import ItemResult

Rows = Sequence[Mapping[str, Any]]
"""A micro-benchmark's rows, as described in ``tracer.campaign.tables``."""


@dataclass(frozen=True)
class Setup:
    """The facts that a run needs in addition to its items.

    Attributes:
        name, description: values for ``campaign.json``.
        device: "cuda" or "cpu".
        threads: threads of torch on the CPU; 0 means torch's own choice.
        part, parts: number of this part and of all parts; 0 for all.
    """

    name: str
    description: str
    device: str
    threads: int = 0
    part: int = 0
    parts: int = 1


class ItemSource(Protocol):
    """Gives a run its items, one at a time. ``setup`` has the facts about the run.

    A run calls ``begin`` once, then ``next`` and ``record`` alternately until ``next`` returns ``None``.
    """

    setup: Setup

    def begin(self, lines: Mapping[str, ItemResult]) -> int:
        """Read the results in the directory; return how many items need not be run."""
        ...

    def known(self) -> Sequence[Item]:
        """Return items with results in the directory, which show how long such items take here."""
        return ()

    def started(self, context: Mapping[str, Any]) -> None:
        """Receive machine and software, in the form of a capture's context, once the first worker is ready.

        Raises ``ForetraceError`` for a machine whose results must not be added to those in the directory.
        """
        return

    def next(self, fits: Callable[[Item], bool]) -> Item | None:
        """Return the next item that fits into the remaining time, or ``None``."""
        ...

    def record(self, item: Item, result: ItemResult, rows: Rows) -> None:
        """Receive the result of an item that ``next`` returned."""
        ...

    def planned(self) -> int:
        """Return the known total number of items; 0 if it is open."""
        ...

    def left(self) -> int:
        """Return the number of items without a result in the directory that have not been run."""
        ...

    def stopped(self) -> str:
        """Return a sentence on why the source ended early; empty if it did not."""
        return ""


class PlanItems(ItemSource):
    """A plan's items in order: those without a result, then failed ones.

    Raises:
        CampaignError: the plan is wrong, or has no such part.
    """

    def __init__(self, plan: Plan, part: int | None = None) -> None:
        self.setup = Setup(plan.name, plan.description, plan.device, plan.threads, part or 0, plan.parts)
        self._items = chosen(plan, part)
        self._todo: list[Item] = []
        self._place = self._ran = 0

    def begin(self, lines: Mapping[str, ItemResult]) -> int:
        """Take over earlier results, by item id; return how many items need not be run."""
        fresh = [item for item in self._items if item.id not in lines]
        self._todo = fresh + [item for item in self._items if item.id in lines and lines[item.id].status == "failed"]
        return len(self._items) - len(self._todo)

    def known(self) -> Sequence[Item]:
        """Return all items of the plan, or of the chosen part."""
        return self._items

    def next(self, fits: Callable[[Item], bool]) -> Item | None:
        """Return the next item that fits; longer ones are skipped, since a shorter one may still fit."""
        while self._place < len(self._todo):
            item = self._todo[self._place]
            self._place += 1
            if fits(item):
                return item
        return None

    def record(self, item: Item, result: ItemResult, rows: Rows) -> None:
        """Ignore a result: the order is fixed."""
        self._ran += 1

    def planned(self) -> int:
        """Return the number of items of the plan, or of the chosen part."""
        return len(self._items)

    def left(self) -> int:
        """Return the number of items that are still to be run."""
        return len(self._todo) - self._ran


def chosen(plan: Plan, part: int | None) -> list[Item]:
    """Return a part's items (None: all) in the order of their run. Raises ``CampaignError`` without such a part."""
    items = expand(plan)
    if part is None:
        return items
    if not 1 <= part <= plan.parts:
        have, choose = ("one part", "leave --part out") if plan.parts == 1 else (
            f"{plan.parts} parts", f"choose one from 1 to {plan.parts}")
        raise CampaignError(f"The plan {plan.name} has {have}, so there is no part {part}; {choose}.")
    return parts(items, plan.parts)[part - 1]
