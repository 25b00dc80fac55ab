"""The items of a plan: what each records, its stable id, whether it is held out, and their order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from tracer.campaign.families import FAMILIES, CampaignFamily
from tracer.campaign.plan import CampaignError, KernelEntry, Plan, WorkloadEntry, combinations, spread
from tracer.errors import ForetraceError
from tracer.workloads import Settings, as_plain, configure, split
from tracer.workloads.registry import HELD_OUT_ONE_IN
from tracer.workloads.settings import SizeRole

Split = Literal["fit", "held-out"]
_ID_LETTERS = 12  # 48 bits: unique among a plan's thousands of items


class Item(msgspec.Struct, frozen=True):
    """One thing to record.

    Attributes:
        id: Hash of the content: kind, name, all settings, counts. Equal content has the same id in any plan.
        kind: "workload" (a capture) or "kernel" (a micro-benchmark).
        name: The workload or the family.
        settings: Every setting, defaults included, as plain values.
        counts: Arguments of ``tracer.capture``; empty for a micro-benchmark.
        split: Whether it is fitted or held out, decided by its sizes alone.
        seconds: Expected time in the plan.
        visit: Number of a micro-benchmark's measurement, from 1; from the second on only its warm times are taken.
    """

    id: str
    kind: Literal["workload", "kernel"]
    name: str
    settings: dict[str, Any]
    counts: dict[str, Any]
    split: Split
    priority: int
    seconds: float
    visit: int = 1

    @property
    def alike(self) -> str:
        """Return a text that is equal for items with comparable ratios of actual to estimated time."""
        return f"{self.kind} {self.name}{' compiled' if self.settings.get('compile') is True else ''}"

    @property
    def needs_fresh_process(self) -> bool:
        """Return whether its host times matter: a profiler that ran earlier in the process would lengthen them."""
        return self.kind == "workload" or self.name == "overheads"

    @property
    def file_stem(self) -> str:
        """Return the name of its file, without the ending."""
        return f"{self.name}-{self.id}"


def expand(plan: Plan) -> list[Item]:
    """Return a plan's items in execution order: by priority, then alternating between workloads and families.

    A workload's items keep the order of the plan (its author puts the extremes first); a family's are taken from all
    over its grid. A repeated configuration runs once, at its first position.

    Raises:
        CampaignError: a workload, family or setting does not exist, a value cannot be used, or the estimates of a
            part exceed the plan's minutes.
    """
    queues: dict[tuple[int, str, str], list[Item]] = {}
    for number, workload in enumerate(plan.workload, start=1):
        where = f"The plan {plan.name}, workload {number} ({workload.workload})"
        queues.setdefault((workload.priority, "workload", workload.workload), []).extend(
            _captures(workload, where, plan.device))
    for number, kernel in enumerate(plan.kernel, start=1):
        where = f"The plan {plan.name}, kernel {number} ({kernel.family})"
        queues.setdefault((kernel.priority, "kernel", kernel.family), []).extend(_benchmarks(kernel, where))
    found: dict[str, Item] = {}
    for priority in sorted({key[0] for key in queues}):
        turns = [items for key, items in queues.items() if key[0] == priority]
        for place in range(max(map(len, turns))):
            for items in turns:
                if place < len(items):
                    found.setdefault(items[place].id, items[place])
    items = list(found.values())
    for number, part in enumerate(parts(items, plan.parts), start=1):
        seconds = sum(item.seconds for item in part)
        if seconds > plan.minutes * 60:
            raise CampaignError(f"The plan {plan.name}: part {number} of {plan.parts} is expected to take "
                                f"{seconds / 60:.1f} minutes and may take {plan.minutes:g}; give it more parts.")
    return items


def parts(items: list[Item], count: int) -> list[list[Item]]:
    """Return the items in order, cut into ``count`` parts of about equal expected time."""
    total = sum(item.seconds for item in items)
    found: list[list[Item]] = [[] for _ in range(count)]
    before = 0.0
    for item in items:
        found[min(count - 1, int((before + item.seconds / 2) / total * count))].append(item)
        before += item.seconds
    return found


def rehearsed(item: Item) -> Item:
    """Return the item with tiny sizes on the CPU, and unchanged id, order, modes and counts."""
    if item.kind == "kernel":
        return msgspec.structs.replace(item, settings=FAMILIES[item.name].tiny(item.settings))
    settings = configure(item.name, **item.settings)
    modes = {
        setting.name: item.settings[setting.name] for setting in settings.listed() if setting.role is SizeRole.MODE
    }
    tiny = configure(item.name, preset="tiny", **{**modes, "device": "cpu"})
    return msgspec.structs.replace(item, settings=as_plain(tiny))


def kernel_item(family: str, settings: dict[str, Any], *, seconds: float, priority: int = 1) -> Item:
    """Return the item of a micro-benchmark; ``settings`` are all settings of its family, checked."""
    return Item(_identity("kernel", family, settings, {}), "kernel", family, settings, {},
                side(FAMILIES[family], settings), priority, seconds)


def side(family: CampaignFamily, settings: dict[str, Any]) -> Split:
    """Return whether a micro-benchmark is fitted or held out, as its whole *shape group* is.

    The rule of ``tracer.workloads.split`` on the text ``gemm batch=1 k=64 …``: the family and its sizes, sorted. So all
    layouts, dtypes, directions and operators of a shape are on the same side. A family without sizes (``overheads``) is
    fitted.
    """
    sizes = sorted(name for name in family.sizes if name in settings)
    if not sizes:
        return "fit"
    text = " ".join([family.name, *(f"{name}={settings[name]}" for name in sizes)])
    digest = hashlib.sha256(text.encode()).digest()
    return "held-out" if int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0 else "fit"


def _captures(entry: WorkloadEntry, where: str, device: str) -> Iterable[Item]:
    for values in combinations(entry, where):
        try:
            settings = configure(entry.workload, preset=entry.preset, **{"device": device, **values})
        except ForetraceError as error:
            raise CampaignError(f"{where}: {error}") from error
        yield _capture(entry, settings)


def _capture(entry: WorkloadEntry, settings: Settings) -> Item:
    counts = {name: getattr(entry, name) for name in ("warmup", "timed", "steps", "cycles", "execution_trace")}
    plain = as_plain(settings)
    return Item(_identity("workload", entry.workload, plain, counts), "workload", entry.workload, plain, counts,
                split(settings), entry.priority, entry.seconds)


def _benchmarks(entry: KernelEntry, where: str) -> list[Item]:
    family = FAMILIES.get(entry.family)
    if family is None:
        raise CampaignError(f"{where}: there is no family {entry.family!r}; choose one of {', '.join(FAMILIES)}.")
    found = []
    for values in combinations(entry, where):
        try:
            settings = family.checked(values)
        except ForetraceError as error:
            raise CampaignError(f"{where}: {error}") from error
        found.append(kernel_item(family.name, settings, priority=entry.priority, seconds=entry.seconds))
    return [found[place] for place in spread(len(found))]


def _identity(kind: str, name: str, settings: dict[str, Any], counts: dict[str, Any]) -> str:
    content = msgspec.json.encode([kind, name, sorted(settings.items()), sorted(counts.items())])
    return hashlib.sha256(content).hexdigest()[:_ID_LETTERS]
