"""The result of a difference: parts that add up to it, each with a kind, a name and a place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from graph_predictor.figures import as_shown
from graph_predictor.prediction.result import which_times
from graph_predictor.recorded.facts import RecordedFacts
from tracer.lazy import pandas as pd
from tracer.shown import MOST_BARS, Chart, ChartSeries, Shown, frame_of


class DifferenceKind(Enum):
    """The kind of a part of a difference; the value is the name people read."""

    ADDED = "only in B"
    REMOVED = "only in A"
    REPLACED = "replaced operations"
    SHAPES = "changed shapes"
    TYPES = "changed types"
    KERNELS = "changed kernels"
    KERNEL_TIME = "kernel time"
    HOST = "host time"
    GAP = "gap"
    LAUNCH = "launches"
    SYNC = "sync"
    COPY = "memory copy"
    COLLECTIVE = "collective"
    WAITING = "waiting for ranks"
    LOADER = "data loading"
    WHOLE_HOST = "host as a whole"
    WHOLE_DEVICE = "device as a whole"
    SHIFT = "moved on or off the critical path"
    IRREGULAR = "not the same in every step"
    REPLAY = "not explained by the replay"


UNEXPLAINED = (DifferenceKind.IRREGULAR, DifferenceKind.REPLAY)
"""Kinds of remaining time that no cause explains."""


NOTABLE = 0.05
"""Certain differences of times by at least this share of the step are listed before smaller changes of the program.
Chosen: unchanged work of two recordings on a quiet machine differs by less."""
PART_COLUMNS = ("kind", "what", "module", "places", "change", "time_us", "certain_us", "hidden_us", "before_us",
                "after_us")
"""Columns of the table of parts, which exist even without rows."""


@dataclass(frozen=True, slots=True)
class Part:
    """One cause of a difference (B less A, nanoseconds a step).

    Attributes:
        kind: kind of the cause.
        what: the operation, kernel or change, in words.
        module: the module with most of its time; empty where the traces name no modules.
        places: number of aligned operations, or places in the program, with this cause.
        time_ns: its effect on the step time.
        hidden_ns: change of work off the critical path, which does not move the step time.
        before_ns, after_ns: times in A and B of the work on the critical path of either. They differ by ``time_ns``,
            because the machine's share is subtracted from the slower side. ``None`` for a program without this work,
            and for time that no operation explains.
        certain_ns: its size in steady times (medians over the steps), minus the spread of unchanged work between A and
            B and between steps.
        change: the change of the program that it belongs to, in words; "" if the program is unchanged there.
        steady_ns, noise_ns: the two terms of the difference ``certain_ns``, the first with its sign.
    """

    kind: DifferenceKind
    what: str
    module: str
    places: int
    time_ns: int
    hidden_ns: int
    before_ns: int | None
    after_ns: int | None
    certain_ns: int
    change: str = ""
    steady_ns: int = 0
    noise_ns: int = 0

    def shown_us(self) -> int:
        """Return the difference of its displayed times in A and in B, whole µs."""
        if self.before_ns is None and self.after_ns is None:
            return as_shown(self.time_ns)
        return as_shown(self.after_ns or 0) - as_shown(self.before_ns or 0)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for JSON, microseconds."""
        return {"kind": self.kind.value, "what": self.what, "module": self.module or None, "places": self.places,
                "change": self.change or None,
                "time_us": self.time_ns / 1e3, "certain_us": self.certain_ns / 1e3,
                "hidden_us": self.hidden_ns / 1e3, **{name: None if ns is None else ns / 1e3 for name, ns in (
                    ("before_us", self.before_ns), ("after_us", self.after_ns))}}


UNSEEN = (DifferenceKind.GAP, DifferenceKind.LOADER)
"""Kinds of time in which a program may have changed although its operations did not. If an operation takes longer with
the same inputs, the cause is the machine or a change elsewhere."""
OUTSIDE = "outside operations (Python, sleep, input or output)"
"""Description of time in which no operation runs."""


@dataclass(slots=True)
class Change:
    """Parts with one cause: a change of the program, or a changed time where the program is the same.

    Attributes:
        what: the cause in words.
        counted: whether the program's operations themselves changed, not only their times.
        unseen: whether it is time in which code may have run that a recording does not show.
        time_ns, hidden_ns: sums over its parts (B minus A).
        steady_ns: the sum in steady times (medians over the steps).
        certain_ns: ``steady_ns`` minus its noise, with the sign kept; 0 if the noise is larger. Noises of the parts add
            in quadrature, because the parts are different operations.
    """

    what: str
    counted: bool
    unseen: bool = False
    time_ns: int = 0
    hidden_ns: int = 0
    steady_ns: int = 0
    certain_ns: int = 0


@dataclass(slots=True, repr=False)
class Difference(Shown):
    """The difference of two jobs' typical steps, B minus A, nanoseconds. ``parts`` add up to ``total_ns`` exactly.

    Attributes:
        before_ns, after_ns: typical step time of A and of B, of the mean rank.
        parts: every cause, the most certain and largest first.
        aligned: share of both programs' operations that have a partner in the other program.
        host_ratio: how much longer B's host takes for unchanged work (1.2: a fifth longer); ``None`` if unknown.
        device_ratio: how much longer B's kernels take, for kernels of equal names; ``None`` if unknown.
        steps_before, steps_after: number of compared steps.
        notes: remarks for the reader.
        profiled: whether both steps are under the profiler.
        ranks: number of compared ranks, over which both times are means.
        recorded_a, recorded_b: facts about the recordings; ``None`` without steps, or if a step was chosen.
    """

    before_ns: int
    after_ns: int
    parts: list[Part]
    aligned: float
    host_ratio: float | None
    device_ratio: float | None
    steps_before: int
    steps_after: int
    notes: list[str] = field(default_factory=list)
    profiled: bool = True
    ranks: int = 1
    recorded_a: RecordedFacts | None = None
    recorded_b: RecordedFacts | None = None

    @property
    def total_ns(self) -> int:
        """B's typical step minus A's, ns."""
        return self.after_ns - self.before_ns

    def shown_us(self) -> int:
        """Return B's step minus A's as displayed, whole µs."""
        return as_shown(self.after_ns) - as_shown(self.before_ns)

    def headline(self) -> str:
        """Return the difference in one line."""
        cause = f"; first cause: {self.parts[0].kind.value}, {self.parts[0].what}" if self.parts else ""
        return (f"A {self.before_ns / 1e6:,.3f} ms, B {self.after_ns / 1e6:,.3f} ms {which_times(self.profiled)}"
                f"{cause}")

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``parts``: every cause, times in µs."""
        return {"parts": lambda: frame_of((part.to_json() for part in self.parts), PART_COLUMNS)}

    def chart(self) -> Chart:
        """Return a chart of the two steps, and below them the causes of their difference."""
        causes = self.parts[:MOST_BARS]
        return Chart("bars", self.headline(), ["A", "B", *(f"{part.kind.value}: {part.what}" for part in causes)], [
            ChartSeries("time", [ns / 1e6 for ns in (self.before_ns, self.after_ns, *(p.time_ns for p in causes))])],
            "ms")

    @property
    def total_us(self) -> float:
        """B's typical step minus A's, µs."""
        return self.total_ns / 1e3

    @property
    def attributed(self) -> float:
        """Return the share of the difference with a named cause: 1 less the absolute unexplained times' share."""
        left = sum(abs(part.time_ns) for part in self.parts if part.kind in UNEXPLAINED)
        return max(0.0, 1.0 - left / abs(self.total_ns)) if self.total_ns else float(left == 0)

    def top(self, number: int = 1) -> list[Part]:
        """Return the first ``number`` parts: the most certain and largest causes."""
        return self.parts[:number]

    def changes(self) -> list[Change]:
        """Return the parts grouped by what changed, the most certain first. Changes of the program come before times
        that only differ, except for unseen code's times that differ by ``NOTABLE`` of the step or more."""
        parts: dict[str, list[Part]] = {}
        for part in self.parts:
            key = part.change or (OUTSIDE if part.kind is DifferenceKind.GAP else
                                  cause_name(part.kind, part.what, part.module))
            parts.setdefault(key, []).append(part)
        found = {key: _change(key, each) for key, each in parts.items()}
        if OUTSIDE in found:
            longest = max(parts[OUTSIDE], key=lambda part: (abs(part.steady_ns), abs(part.time_ns)))
            found[OUTSIDE].what = f"{OUTSIDE}: mostly {longest.what}"
        least = NOTABLE * self.before_ns

        def sure(change: Change) -> int:
            return abs(change.certain_ns) if change.counted or (
                change.unseen and abs(change.certain_ns) >= least) else 0

        return sorted(found.values(), key=lambda each: (-sure(each), not each.counted, -abs(each.time_ns), each.what))

    def by_kind(self) -> list[tuple[DifferenceKind, int, int]]:
        """Return the kind, time and hidden time (ns) of every kind that occurs, largest first."""
        sums: dict[DifferenceKind, list[int]] = {}
        for part in self.parts:
            known = sums.setdefault(part.kind, [0, 0])
            known[0] += part.time_ns
            known[1] += part.hidden_ns
        found = [(kind, time, hidden) for kind, (time, hidden) in sums.items()]
        return sorted(found, key=lambda each: (-abs(each[1]), -abs(each[2]), each[0].value))

    def hidden(self) -> list[Part]:
        """The parts with changed work off the critical path, largest first."""
        return sorted((part for part in self.parts if part.hidden_ns), key=lambda part: -abs(part.hidden_ns))

    def to_json(self, top: int | None = None) -> dict[str, Any]:
        """Return plain values for JSON, microseconds; at most ``top`` parts."""
        return {
            "times": which_times(self.profiled),
            "recorded_a": None if self.recorded_a is None else self.recorded_a.to_json(),
            "recorded_b": None if self.recorded_b is None else self.recorded_b.to_json(),
            "before_us": self.before_ns / 1e3, "after_us": self.after_ns / 1e3, "total_us": self.total_us,
            "attributed": self.attributed, "aligned": self.aligned, "host_ratio": self.host_ratio,
            "device_ratio": self.device_ratio, "steps_before": self.steps_before, "steps_after": self.steps_after,
            "kinds": [{"kind": kind.value, "time_us": time / 1e3, "hidden_us": hidden / 1e3}
                      for kind, time, hidden in self.by_kind()],
            "parts": [part.to_json() for part in self.parts[:top]], "parts_total": len(self.parts),
            "notes": self.notes,
        }


def _change(what: str, parts: list[Part]) -> Change:
    steady = sum(part.steady_ns for part in parts)
    noise = sum(part.noise_ns**2 for part in parts) ** 0.5
    certain = max(0, round(abs(steady) - noise)) * (1 if steady >= 0 else -1)
    counted = bool(parts[0].change)
    return Change(what, counted, not counted and parts[0].kind in UNSEEN, sum(part.time_ns for part in parts),
                  sum(part.hidden_ns for part in parts), steady, certain)


def cause_name(kind: DifferenceKind, what: str, module: str) -> str:
    """Return the name of a cause: its kind, operation and module."""
    return f"{kind.value}: {what}" + (f" in {module}" if module else "")
