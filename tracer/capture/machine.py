"""Whether the machine disturbed a capture: how long steps waited for a processor, and a verdict.

Linux counts for each thread how long it was ready while another ran (``/proc/thread-self/schedstat``, its second
number, ns; the kernel's ``Documentation/scheduler/sched-stats.rst``). For the machine it counts time that a hypervisor
took (``steal`` of ``/proc/stat``), read at a phase's ends. Waits are read between steps, where nothing is timed::

    step      |=== 1 ===|  |=== 2 =|waits|=|  |=== 3 ===|
    read      ^         ^  ^               ^  ^         ^

A thread's wait is no work of its step. Where the host computes, waits are subtracted from the steps when the capture is
read (``tracer.capture_layout``). Without their waits, three programs of ``benchmarks/foreign_programs`` took the same
time within 3% in the median, although they waited for a quarter or a half of it. Other disturbances widen intervals.
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
"""Loss of a step with each loss of its processor, beyond the wait: 2 MB of a second-level cache at 7 GB/s (chosen)."""
SIBLING = 0.235
"""Log half width of a step while others use the other threads of its core. Two threads of one core do 1.25 times the
work of one, so that each takes 1.6 times as long. Half of its logarithm, as others may use another core (chosen)."""
STOLEN = 0.03
"""Share of the machine's time that other machines on its hardware took, above which it was busy."""
SCATTERED = 0.2
"""Limit of timed steps' interquartile range over median: three times that of the suite's captures on idle cores."""
DRIFTED = 0.1
"""Change of the median from the first to the last third of the timed steps, above which they drift. Chosen."""
FASTER = 0.95
"""A profiler shortens no step: below this share of an unprofiled step, the machine changed."""
ALTERNATES = 1.15
"""In a loop that alternates, each long step takes at least this multiple of any other step's time."""
LEAST_STEPS = 6
"""Fewer timed steps show neither drift nor scatter."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The disturbances of some steps.

    Attributes:
        ns: Time of all the steps, ns.
        waited_ns: Time that each step's thread was ready while others ran, ns.
        switches: How often the thread lost its processor.
        stolen: Share of the machine's time that other machines on its hardware took.
        others: Mean number of processors that other processes used.
    """

    ns: int = 0
    waited_ns: tuple[int, ...] = ()
    switches: int = 0
    stolen: float = 0.0
    others: float = 0.0

    @property
    def share(self) -> float:
        """Return the share of the steps' time spent waiting."""
        return min(sum(self.waited_ns) / self.ns, 1.0) if self.ns > 0 else 0.0


class WaitingLog:
    """Counts, by phase of a capture, the disturbances of its measured steps. Nothing is counted where the system does
    not report waits."""

    def __init__(self) -> None:
        self.phases: dict[str, Waiting] = {}
        self._thread = _ThreadWaits()
        self._begun: tuple[int, int] | None = None
        self._goes_on = False
        """Whether the next step began where the previous one ended."""
        self._since: tuple[float, float, float, float, float] | None = None
        self._phase = ""

    def enter(self, phase: str) -> None:
        """Note that the capture leaves its phase and enters another one."""
        now, left = _of_machine(), self.phases.get(self._phase)
        if left is not None and self._since is not None:
            stolen, others = _between(self._since, now)
            self.phases[self._phase] = replace(left, stolen=stolen, others=others)
        self._phase, self._since = phase, now
        self._thread.close()

    def begin(self) -> None:
        """Note that a step begins, unless it began where the previous one ended."""
        if not self._goes_on:
            self._begun = self._thread.read()
        self._goes_on = False

    def end(self, ns: int, *, next_begins: bool = False) -> None:
        """Note that a measured step of ``ns`` has ended, and whether the next one begins at once."""
        now, begun = self._thread.read(), self._begun
        self._begun, self._goes_on = now, next_begins
        if now is None or begun is None:
            return
        before = self.phases.get(self._phase, Waiting())
        self.phases[self._phase] = Waiting(before.ns + ns, (*before.waited_ns, min(max(now[0] - begun[0], 0), ns)),
                                           before.switches + max(now[1] - begun[1], 0))

    def to_json(self) -> dict[str, Any]:
        """Return the counts in the form of ``context.json``; empty if there are none."""
        return {phase: asdict(found) for phase, found in self.phases.items()}


class _ThreadWaits:
    """The time that this thread has waited for a processor so far, and the number of times it lost its processor.

    Borders of profiled steps lie inside ranges that the profiler marks as steps. So the file stays open: opening it
    takes fifteen times as long as reading it (60 and 4 µs).
    """

    def __init__(self) -> None:
        self._file, self._of = -1, 0

    def read(self) -> tuple[int, int] | None:
        """Return the waits so far, ns, and the losses of the processor; ``None`` if the system counts neither."""
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
    """Return the clock and processor time so far, s: all, busy, stolen, and our own; ``None`` where not counted."""
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
    """Return the share of the machine's time that was stolen, and the mean number of processors that others used."""
    if since is None or now is None or now[1] <= since[1]:
        return 0.0, 0.0
    passed, every, busy, stolen, own = (one - other for one, other in zip(now, since, strict=True))
    return round(stolen / every, 4), round(max(busy - own, 0.0) / max(passed, 1e-9), 2)


@dataclass(frozen=True, slots=True)
class CaptureVerdict:
    """The worth of a capture, judged by the machine's behaviour.

    Attributes:
        reasons: A phrase for each disturbance; empty if there was none.
        sure: Whether the machine is the cause; otherwise steps with unequal work are another possible cause.
        spread: Log half width that the machine adds to every prediction from the capture, beyond the differences
            between its timed steps.
    """

    reasons: tuple[str, ...]
    spread: float
    sure: bool = True

    def sentence(self) -> str:
        """Return a sentence on the disturbances and the remedy; empty without disturbances."""
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
        """Return the entry of ``context.json``."""
        return {"reasons": list(self.reasons), "spread": round(self.spread, 4), "sentence": self.sentence()}


def verdict(phases: dict[str, Waiting], timed_ns: Sequence[int], slowdown: float | None, *,
            on_host: bool = True) -> CaptureVerdict:
    """Judge a capture.

    Args:
        phases: disturbances of the steps of each phase.
        timed_ns: times of the steps without the profiler, ns.
        slowdown: step under the profiler over step without it; ``None`` where either was not measured.
        on_host: whether the host computes, so that waits are subtracted from its steps.
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
    """Return the timed steps less their waits for a processor, ns, if the waits were counted."""
    waited = phases.get("timed", Waiting()).waited_ns
    if len(waited) != len(timed_ns):
        return list(timed_ns)
    return [ns - wait for ns, wait in zip(timed_ns, waited, strict=True)]


def _beyond(found: Waiting, *, on_host: bool) -> float:
    """Return the log uncertainty that waits add to a phase's steps, beyond the steps' own differences."""
    if not on_host:  # it is unknown how much of the wait the device hid
        return -math.log1p(-min(found.share, 0.9))
    worked = max(found.ns - sum(found.waited_ns), 1)
    return math.hypot(math.log1p(found.switches * REFILL_NS / worked), SIBLING * min(found.others, 1.0))


def _of_times(timed_ns: Sequence[int]) -> list[str]:
    """Return what the timed steps show by themselves. A loop that alternates is left out: its steps differ anyway."""
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
    """Return the period, in timed steps, at which long steps recur, and their time over that of short ones; ``None``
    where they do not. Only a hint: the operations alone show what a loop does."""
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
    """Write to stderr at once. This is no Python warning, which a program may turn into an error of its step."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is closed or missing
        sys.stderr.write(f"foretrace: {text}\n")
        sys.stderr.flush()
