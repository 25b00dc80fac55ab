"""Measured calls: readers of tables and traces return them, models are fitted to them and judged by them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import overload

import numpy as np

from kernel_models.op_call import Family, OpCall
from tracer.arrays import Bool, Float64, Int64
from tracer.errors import ForetraceError

HELD_OUT_SHARE = 0.2  # chosen: a fifth


class DataError(ForetraceError):
    """A table of measurements cannot be read, or holds nothing to learn from."""


def share_of(label: str) -> float:
    """Return a number in [0, 1) that depends on the label alone: from its SHA-256."""
    return int.from_bytes(hashlib.sha256(label.encode()).digest()[:8], "big") / 2.0**64


def is_held_out(group: str) -> bool:
    """Return whether a shape group is held out: a fifth of all groups is, by the hash of their label.

    This rule was fixed before any model was fitted and does not depend on times, devices or software. So a group is
    held out of the data of every device and stack, or of none.
    """
    return share_of(group) < HELD_OUT_SHARE


def fold_of(group: str, folds: int) -> int:
    """Return the cross-validation fold of a group, independent of ``is_held_out``."""
    return int(share_of(f"fold {group}") * folds)


class DeferredCalls(Sequence[OpCall]):
    """Calls that are made on first access: most calls of a table belong to devices and stacks that are never read.

    Args:
        count: number of calls.
        make: function that makes all calls.
    """

    def __init__(self, count: int, make: Callable[[], list[OpCall]]) -> None:
        self._count, self._make = count, make

    @cached_property
    def _calls(self) -> list[OpCall]:
        calls = self._make()
        if len(calls) != self._count:
            raise ValueError(f"{len(calls):,} calls were made of {self._count:,} rows")
        return calls

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> OpCall: ...
    @overload
    def __getitem__(self, place: slice) -> list[OpCall]: ...
    def __getitem__(self, place: int | slice) -> OpCall | list[OpCall]:
        return self._calls[place]

    def __iter__(self) -> Iterator[OpCall]:
        return iter(self._calls)


@dataclass(frozen=True)
class Samples:
    """Measured calls of one family on one device with one software stack.

    Attributes:
        device: Name of ``kernel_models.device``.
        software: Library and version, and the implementation where there are several.
        source: File or trace of the measurements.
        calls: The measured calls, [n].
        measured_us: The times, [n] microseconds.
        groups: Shape groups, by the name of the grouping: calls with equal labels are similar, and stay together in
            every split. The first grouping is the default one, [n] each.
        held_out: Rows that the table itself marks as held out, or ``None``: they are never fitted to, [n].
    """

    device: str
    software: str
    source: str
    calls: Sequence[OpCall]
    measured_us: Float64
    groups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    held_out: Bool | None = None

    def __len__(self) -> int:
        return len(self.calls)

    @property
    def family(self) -> Family:
        """Return the family of all calls."""
        return self.calls[0].family

    def labels(self, grouping: str = "") -> Sequence[str]:
        """Return the group of every call; for calls without a group, their sizes."""
        if not self.groups:
            return ["x".join(map(str, call.dims)) for call in self.calls]
        return self.groups[grouping or next(iter(self.groups))]

    def taken(self, rows: Bool | Int64) -> Samples:
        """Return the samples with the chosen rows only."""
        places = np.flatnonzero(rows) if rows.dtype == np.bool_ else rows
        return replace(
            self, calls=[self.calls[i] for i in places], measured_us=self.measured_us[places],
            groups={name: [labels[i] for i in places] for name, labels in self.groups.items()},
            held_out=None if self.held_out is None else self.held_out[places])

    def aggregated(self) -> Samples:
        """Return each call once, with the median of its times; a call in both splits stays in the held-out one."""
        rows: dict[OpCall, list[int]] = {}
        for i, call in enumerate(self.calls):
            rows.setdefault(call, []).append(i)
        if len(rows) == len(self.calls):
            return self
        first = self.taken(np.array([places[0] for places in rows.values()]))
        held_out = self.held_out
        return replace(
            first, measured_us=np.array([np.median(self.measured_us[places]) for places in rows.values()]),
            held_out=None if held_out is None else np.array([held_out[places].any() for places in rows.values()]))

    def split(self, grouping: str = "") -> Bool:
        """Return which rows are held out: those that the table marks, else the groups that ``is_held_out`` picks."""
        if self.held_out is not None:
            return self.held_out
        return by_label(self.labels(grouping), is_held_out)


def by_family(device: str, software: str, source: str, calls: Sequence[OpCall], us: Sequence[float]) \
        -> Iterator[Samples]:
    """Yield samples by family from measured calls; the shape group is the sizes."""
    places: dict[Family, list[int]] = {}
    for place, call in enumerate(calls):
        places.setdefault(call.family, []).append(place)
    for mine in places.values():
        yield Samples(device, software, source, [calls[i] for i in mine], np.array([us[i] for i in mine]),
                      {"shape": ["x".join(map(str, calls[i].dims)) for i in mine]})


def by_label(labels: Sequence[str], rule: object) -> Bool:
    """Return a rule's answer for each label; the rule is evaluated once per distinct label."""
    assert callable(rule)
    answers = {label: bool(rule(label)) for label in set(labels)}
    return np.array([answers[label] for label in labels], bool)


def joined(samples: Iterable[Samples]) -> list[Samples]:
    """Return samples with the measurements of each device, software and family joined, aggregated, largest first.

    Products without elements, whose time is only a launch, teach no rate and are left out.
    """
    together: dict[tuple[str, str, Family], list[Samples]] = {}
    for one in samples:
        if len(one) and one.family is Family.GEMM:
            some = np.array([all(call.dims) for call in one.calls])
            one = one if some.all() else one.taken(some)
        if len(one):
            together.setdefault((one.device, one.software, one.family), []).append(one)
    found = []
    for parts in together.values():
        if len(parts) == 1:
            found.append(parts[0].aggregated())
            continue
        marked = any(part.held_out is not None for part in parts)
        names = set.intersection(*(set(part.groups) for part in parts))
        found.append(replace(
            parts[0], source=", ".join(dict.fromkeys(part.source for part in parts)),
            calls=[call for part in parts for call in part.calls],
            measured_us=np.concatenate([part.measured_us for part in parts]),
            groups={name: [label for part in parts for label in part.groups[name]]
                    for name in parts[0].groups if name in names},
            held_out=np.concatenate([part.split() for part in parts]) if marked else None,
        ).aggregated())
    return sorted(found, key=lambda one: (one.family.value, -len(one), one.software))
