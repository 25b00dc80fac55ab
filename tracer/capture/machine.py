"""Whether the machine let a capture measure: how long steps waited for a processor, and a verdict.

Linux counts for each thread how long it was ready while another ran (``/proc/thread-self/schedstat``, its second
number, ns; the kernel's ``Documentation/scheduler/sched-stats.rst``). For the machine it counts what a hypervisor took
(``steal`` of ``/proc/stat``), read at the ends of a phase. Waits are read between steps, where nothing is timed::

    step      |=== 1 ===|  |=== 2 =|waits|=|  |=== 3 ===|
    read      ^         ^  ^               ^  ^         ^

A wait of a thread is no work of its steps. Where the host computes, waits are left out of the steps when the capture is
read (``tracer.capture_layout``). Without their waits, three programs of ``benchmarks/foreign_programs`` took the same
within 3% in the median, with waits of a quarter or a half of their time. Other disturbances widen intervals.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from tracer.capture_layout import WAITED

REFILL_NS = 300_000
"""What a step loses with its processor beyond the wait: 2 MB of a second-level cache at 7 GB/s (chosen)."""
SIBLING = 0.235
"""Log half width of a step while others use the other threads of its core. Two threads of one core together do 1.25
times what one does, so that each takes 1.6 times as long. Half of its logarithm, as it may be another core (chosen)."""
STOLEN = 0.03
"""Share of the machine's time that others on its hardware took, above which the machine was busy."""
SCATTERED = 0.2
"""Interquartile range of timed steps over their median: three times the suite's captures on idle cores."""
DRIFTED = 0.1
"""Change of the median from the first to the last third of the timed steps. Chosen."""
FASTER = 0.95
"""A profiler makes no step shorter: below this share of an unprofiled step, the machine changed."""
ALTERNATES = 1.15
"""Steps of a loop that alternates: every long one takes at least this multiple of each of the others' time."""
LEAST_STEPS = 6
"""Fewer timed steps show neither drift nor scatter."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """What kept some steps from a processor.

    Attributes:
        ns: What they took in all.
        waited_ns: Of each step's time, how long its thread was ready while others ran.
        switches: How often it was taken off its processor.
        stolen: Share of the machine's time that others on its hardware took.
        others: Processors that other processes of the machine used in the mean.
    """

    ns: int = 0
    waited_ns: tuple[int, ...] = ()
    switches: int = 0
    stolen: float = 0.0
    others: float = 0.0

    @property
    def share(self) -> float:
        """Return the share of their time that the steps waited."""
        return min(sum(self.waited_ns) / self.ns, 1.0) if self.ns > 0 else 0.0


class WaitingLog:
    """Counts, by phase of a capture, what kept its measured steps from a processor. Where the system does not say,
    nothing is counted."""

    def __init__(self) -> None:
        self.phases: dict[str, Waiting] = {}
        self._thread = _ThreadWaits()
        self._begun: tuple[int, int] | None = None
        self._goes_on = False
        """Whether the next step began where the one before ended."""
        self._since: tuple[float, float, float, float, float] | None = None
        self._phase = ""

    def enter(self, phase: str) -> None:
        """Note that the capture enters a phase, and so leaves another one."""
        now, left = _of_machine(), self.phases.get(self._phase)
        if left is not None and self._since is not None:
            stolen, others = _between(self._since, now)
            self.phases[self._phase] = replace(left, stolen=stolen, others=others)
        self._phase, self._since = phase, now
        self._thread.close()

    def begin(self) -> None:
        """Note that a step begins, unless it began where the one before ended."""
        if not self._goes_on:
            self._begun = self._thread.read()
        self._goes_on = False

    def end(self, ns: int, *, next_begins: bool = False) -> None:
        """Note that a measured step has ended, how long it took, ns, and whether the next one begins at once."""
        now, begun = self._thread.read(), self._begun
        self._begun, self._goes_on = now, next_begins
        if now is None or begun is None:
            return
        before = self.phases.get(self._phase, Waiting())
        self.phases[self._phase] = Waiting(before.ns + ns, (*before.waited_ns, min(max(now[0] - begun[0], 0), ns)),
                                           before.switches + max(now[1] - begun[1], 0))

    def to_json(self) -> dict[str, Any]:
        """Return the counts as ``context.json`` holds them; empty where there are none."""
        return {phase: asdict(found) for phase, found in self.phases.items()}


class _ThreadWaits:
    """How long this thread has waited for a processor so far, and how often it lost its processor.

    Borders of profiled steps lie inside what the profiler marks as a step. So the file stays open: opening it takes
    fifteen times as long as reading it (60 and 4 µs).
    """

    def __init__(self) -> None:
        self._file, self._of = -1, 0

    def read(self) -> tuple[int, int] | None:
        """Return the waiting so far, ns, and the losses of a processor; ``None`` if the system does not count them."""
        try:
            import resource  # not on Windows

            if self._of != threading.get_ident():
                self.close()
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
                self._of = threading.get_ident()
            waited = int(os.pread(self._file, 128, 0).split()[1])
        except (OSError, ValueError, IndexError, ImportError):
            return None
        return waited, resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw

    def close(self) -> None:
        """Close the file; reading opens it again."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._of = -1, 0


def _of_machine() -> tuple[float, float, float, float, float] | None:
    """Return the clock, and processor time so far, s: of all processors, of them busy, stolen, and our own."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            user, nice, system, idle, waiting, irq, soft, stolen = map(int, file.readline().split()[1:9])
        tick = os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None
    busy = user + nice + system + irq + soft
    return (time.monotonic(), (busy + idle + waiting + stolen) / tick, busy / tick, stolen / tick, time.process_time())


def _between(since: tuple[float, float, float, float, float] | None,
             now: tuple[float, float, float, float, float] | None) -> tuple[float, float]:
    """Return the share of the machine's time that was stolen, and the processors that others used."""
    if since is None or now is None or now[1] <= since[1]:
        return 0.0, 0.0
    passed, every, busy, stolen, own = (one - other for one, other in zip(now, since, strict=True))
    return round(stolen / every, 4), round(max(busy - own, 0.0) / max(passed, 1e-9), 2)


@dataclass(frozen=True, slots=True)
class CaptureVerdict:
    """The worth of a capture, judged by what the machine did meanwhile.

    Attributes:
        reasons: What was seen, a phrase each; empty where nothing was.
        sure: Whether it was the machine; else steps that do unlike work may show the same.
        spread: Log half width that the machine adds to every prediction from the capture, beyond what its timed steps
            differ by.
    """

    reasons: tuple[str, ...]
    spread: float
    sure: bool = True

    def sentence(self) -> str:
        """Say what was seen and what to do; empty where nothing was."""
        if not self.reasons:
            return ""
        seen = "; ".join(self.reasons)
        if not self.sure:
            return (f"the machine may have changed its speed while this was recorded ({seen}): unless the steps do "
                    "unlike work, end what else runs and capture again with --replace; until then intervals are as "
                    "wide as these steps.")
        return (f"the machine was busy or changed its speed while this was recorded ({seen}): end what else runs, or "
                "wait for it, and capture again with --replace; until then intervals are wider by "
                f"{math.expm1(self.spread):.0%}.")

    def to_json(self) -> dict[str, Any]:
        """Return what ``context.json`` holds."""
        return {"reasons": list(self.reasons), "spread": round(self.spread, 4), "sentence": self.sentence()}


def verdict(phases: dict[str, Waiting], timed_ns: Sequence[int], slowdown: float | None, *,
            on_host: bool = True) -> CaptureVerdict:
    """Judge a capture.

    Args:
        phases: what kept the steps of each phase from a processor.
        timed_ns: steps without the profiler, ns.
        slowdown: step under the profiler over step without it; ``None`` where either was not measured.
        on_host: whether the host computes, so that waits are left out of its steps.
    """
    reasons, spread = [], 0.0
    waited = max((one.share for one in phases.values()), default=0.0)
    if waited > WAITED:
        most = max(phases.values(), key=lambda one: one.share)
        others = f", beside {most.others:.1f} busy processors of others" if most.others >= 0.1 else ""
        reasons.append(f"steps waited {waited:.0%} of their time for a processor and lost it {most.switches:,} times"
                       f"{others}")
    stolen = max((one.stolen for one in phases.values()), default=0.0)
    if stolen > STOLEN:
        reasons.append(f"other machines on its hardware took {stolen:.0%} of its time")
    spread = math.hypot(-math.log1p(-min(stolen, 0.9)), *(_beyond(one, on_host=on_host) for one in phases.values()
                                                          if one.share > WAITED))
    if slowdown is not None and 0 < slowdown < FASTER:
        reasons.append(f"a step took {slowdown:.2f} times as long under the profiler, which makes none shorter")
        spread = math.hypot(spread, math.log(slowdown))
    return CaptureVerdict((*reasons, *_of_times(without_waits(phases, timed_ns))), spread, bool(reasons))


def without_waits(phases: dict[str, Waiting], timed_ns: Sequence[int]) -> list[int]:
    """Return the timed steps without what they waited for a processor, where that was counted."""
    waited = phases.get("timed", Waiting()).waited_ns
    if len(waited) != len(timed_ns):
        return list(timed_ns)
    return [ns - wait for ns, wait in zip(timed_ns, waited, strict=True)]


def _beyond(found: Waiting, *, on_host: bool) -> float:
    """Return by how much (log) waiting steps are unsure, beyond what they differ by."""
    if not on_host:  # nobody knows how much of the wait the device hid
        return -math.log1p(-min(found.share, 0.9))
    worked = max(found.ns - sum(found.waited_ns), 1)
    return math.hypot(math.log1p(found.switches * REFILL_NS / worked), SIBLING * min(found.others, 1.0))


def _of_times(timed_ns: Sequence[int]) -> list[str]:
    """Return what the timed steps show by themselves; those of a loop that alternates differ for another reason."""
    times = np.array(timed_ns, np.float64)
    if len(times) < LEAST_STEPS or not (times > 0).all() or alternation(timed_ns) is not None:
        return []
    low, middle, high = np.percentile(times, (25, 50, 75))
    third = len(times) // 3
    change = float(np.median(times[-third:]) / np.median(times[:third]) - 1.0)
    found = []
    if high - low > SCATTERED * middle:
        found.append(f"half of the timed steps are more than {(high - low) / middle:.0%} of their median apart")
    elif abs(change) > DRIFTED:
        found.append(f"the timed steps changed by {change:+.0%} from first to last")
    return found


def alternation(timed_ns: Sequence[int]) -> tuple[int, float] | None:
    """Return after how many timed steps long ones come again, and how many times as long they are; ``None`` where they
    do not. Only a hint: what a loop does is known from its operations alone."""
    times = np.array(timed_ns, np.float64)
    for period in range(2, len(times) // 2 + 1):
        phases = [times[first::period] for first in range(period)]
        order = sorted(range(period), key=lambda phase: -float(phases[phase].min()))
        for many in range(1, period):
            long = np.concatenate([phases[phase] for phase in order[:many]])
            short = np.concatenate([phases[phase] for phase in order[many:]])
            if long.min() > ALTERNATES * short.max() > 0:
                return period, float(np.median(long) / np.median(short))
    return None


def say(text: str) -> None:
    """Say something on stderr at once. No warning, which a program may have turned into an error of its step."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
        sys.stderr.write(f"foretrace: {text}\n")
        sys.stderr.flush()
