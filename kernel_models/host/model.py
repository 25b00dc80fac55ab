"""``HostModel``: the host time of a step nobody ran, from steps of other programs on the same host.

An event (``HostMoment``) is an operation's own time, or the time before it. In program p the event e, of n tensors,
after c calls of Python functions, costs

    ns = cold(e) · (program(p) · base(e) · python(c) + slope(e) · n),     cold = exp(0.2 · log₂ max(distance / 8, 1))

*Base*: what is known of the event as it is (an operation in its phase; the time between the same two), drawn towards
what is known of its kind, where few programs have it: ``log base = (n · own + pool) / (n + 1)`` over n programs, pool
by pool. *Program*: programs differ as a whole, since computing on the host itself leaves its caches cold:
``log program = a + b · log(compute + 1 µs)``, compute being an operation's in the mean. *Distance*: events since the
same one ran last, around the end of the step. *Tensors*: an optimizer's list operations, and the Python around them,
cost so much for each tensor; what a step begins and ends with, and the way into backward and optimizer, for each
parameter or node of autograd. *Calls*: what a model's own Python does between two operations no name tells; it grows
with its calls, each of which costs less where there are many: ``python = ((c + 3) / 13)^0.85``, and 1 without any.
Where calls were not counted in the step in question python is 1 throughout; ``HostModel.counted`` is the fit with them,
to programs that have them counted, and to what all others tell of operations' own time and of a step's ways into
backward, into the optimizer and to its end.

Shared overheads as such, means by kind of launch, are from Lin et al. (2022). Constants here were chosen with the
programs of ``traces/host``, never with those of ``traces/host-held-out``, which accuracy is reported of
(``benchmarks/host_model.py``).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import numpy as np

from kernel_models.host.events import (
    HostMoment,
    Label,
    host_events,
    is_same_without_calls,
    is_sharded,
    pools_of,
    unsharded,
)
from kernel_models.host.step_events import HostStep
from kernel_models.spreads import END as Z80
from kernel_models.spreads import OTHER_PROGRAM
from tracer.arrays import Float64
from tracer.decode import DecodeError, convert
from tracer.errors import ForetraceError

POOL_WEIGHT = 1.0
"""Programs that what is known of an event's kind counts for."""
LEAST_NS = 50.0
"""Least base cost that a pool counts."""
MEAN_SHARE = 0.25
"""Share of the mean in a pool's logarithm, the rest of it the mean of logarithms: a few events cost many times the
others of their pool, and a sum needs means."""
MOST_OF_POOL = 10.0
"""Times the middle of its pool that an event counts for in that mean: one that takes longer is no one of its kind (8 ms
of a CPU's ``aten::max`` among launches)."""
LEAST_COMPUTE_US = 1.0
"""Computation of an operation that makes no difference."""
FIRST_CALLS, USUAL_CALLS, CALLS_POWER = 3.0, 10.0, 0.85
"""Calls of Python that any at all count for; of which base costs are; and how costs grow with them: from 5 µs of one
call to 12 µs of ten and 85 µs of 150, on the EPYC."""
LEAST_PROGRAMS = 4
"""So many tell how far others lie from them; fewer take ``spreads.OTHER_PROGRAM``."""
ROUNDS = 8
"""Of fitting bases and programs in turn; three change nothing any more."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Pool:
    """What is known of a label: the logarithm of its base (ns), how many labels it pools, and in how many programs."""

    log_base: float
    labels: int
    programs: int


@dataclass(frozen=True, slots=True)
class HostModel:
    """Fitted on steps of programs of one host; see the module's text.

    Attributes:
        pools: by label.
        slopes: ns for each tensor, by an event's own label; "own" and "before" alone for all others.
        offset, exponent: a and b of programs.
        spread: log half width of the 80% interval of an unseen program's host time.
        launch_ns: what one launch takes; 0 where none was recorded.
        programs: how many were fitted.
        host: whose they are.
        with_calls: whether it tells steps in which calls of Python functions were counted.
        counted: the same host, told with the calls; ``None`` where too few of its programs had theirs counted.
    """

    pools: dict[Label, Pool]
    slopes: dict[Label, float]
    offset: float
    exponent: float
    spread: float
    launch_ns: float
    programs: int
    host: str = ""
    with_calls: bool = False
    counted: HostModel | None = None

    def suited(self, has_calls: bool) -> HostModel:
        """Return the fit for a step in which calls of Python functions were counted, or were not."""
        return self.counted if has_calls and self.counted is not None else self

    def estimate(self, step: HostStep) -> tuple[Float64, Float64]:
        """Return time before each operation and after the last one, [n + 1], and in each, [n], ns; times in ``step``
        are not looked at."""
        if step.calls is not None and self.counted is not None:
            return self.counted.estimate(step)
        factor = self.factor(step)
        known: dict[Label, tuple[float, float]] = {}
        found = np.zeros(2 * len(step) + 1)
        for event in host_events(step, self.with_calls):
            if event.label not in known:
                known[event.label] = factor * self._base(event.label), self._slope(event.label)
            base, slope = known[event.label]
            found[event.place] = event.cold * (base * _python(event.calls) + slope * event.tensors)
        return found[0::2], found[1::2]

    def factor(self, step: HostStep) -> float:
        """Return what the program as a whole multiplies its events' costs by."""
        return float(np.exp(self.offset + self.exponent * np.log(step.compute_us + LEAST_COMPUTE_US)))

    def knows(self, step: HostStep) -> Float64:
        """Return which events, as ``estimate`` orders them (before, in, before, …), are known as they are."""
        found = np.zeros(2 * len(step) + 1)
        for event in host_events(step, self.with_calls):
            found[event.first:event.place + 1] = event.label in self.pools
        return found

    def _slope(self, label: Label) -> float:
        return self.slopes.get(label, self.slopes.get(label[:1], 0.0))

    def _base(self, label: Label) -> float:
        found: float | None = None
        for pool in reversed([*pools_of(label), *(pools_of(unsharded(label)) if is_sharded(label) else ())]):
            if (known := self.pools.get(pool)) is None:
                continue
            count = known.programs if pool == label else known.labels
            found = known.log_base if found is None else (count * known.log_base + POOL_WEIGHT * found) / (
                count + POOL_WEIGHT)
        return 0.0 if found is None else float(np.exp(found))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a file."""
        return {"host": self.host, "offset": self.offset, "exponent": self.exponent, "spread": self.spread,
                "launch_ns": self.launch_ns, "programs": self.programs, "with_calls": self.with_calls,
                "counted": None if self.counted is None else self.counted.to_dict(),
                "pools": [[list(label), round(pool.log_base, 4), pool.labels, pool.programs]
                          for label, pool in self.pools.items()],
                "slopes": [[list(label), round(slope, 3)] for label, slope in self.slopes.items()]}

    @classmethod
    def from_dict(cls, state: Any) -> HostModel:
        """Return the reverse of ``to_dict``. Raises ``ForetraceError`` for what it did not write."""
        try:
            found = convert(state, _State)
        except DecodeError as error:
            raise ForetraceError(f"The host model is not in the form foretrace writes ({error}): the file is damaged "
                                 "or of another version; fit it again.") from None
        return cls._of(found)

    @classmethod
    def _of(cls, found: _State) -> HostModel:
        return cls({tuple(label): Pool(base, labels, programs) for label, base, labels, programs in found.pools},
                   {tuple(label): slope for label, slope in found.slopes}, found.offset, found.exponent, found.spread,
                   found.launch_ns, found.programs, found.host, found.with_calls,
                   None if found.counted is None else cls._of(found.counted))


class _State(msgspec.Struct):
    """The values that ``to_dict`` returns."""

    host: str
    offset: float
    exponent: float
    spread: float
    launch_ns: float
    programs: int
    pools: list[tuple[list[str], float, int, int]]
    slopes: list[tuple[list[str], float]]
    with_calls: bool = False
    counted: _State | None = None


def fit_host(steps: Sequence[HostStep], host: str = "") -> HostModel:
    """Fit to recorded steps, one of each program.

    Each program is left out in turn: what the others miss it by, in the mean, is put right (sums need means, and pools
    are of logarithms), and how far these misses lie apart is the interval; of programs whose parameters nobody shards,
    where there are enough.

    Raises:
        ForetraceError: there is no host time in them.
    """
    steps = [step for step in steps if len(step) and step.host_ns > 0]
    if not steps:
        raise ForetraceError("There is no host time to learn from: the captures have no operations on any host thread. "
                             "Profile whole steps, with ProfilerActivity.CPU.")
    found = _corrected(steps, host, False)
    has_calls = sum(step.calls is not None for step in steps)
    hooks = any(step.calls is None and step.sharded for step in steps)  # lie before operations: all or none are told
    if has_calls == len(steps) or (has_calls >= LEAST_PROGRAMS and not hooks):
        return replace(found, counted=_corrected(steps, host, True))
    return found


def _corrected(steps: Sequence[HostStep], host: str, counted: bool) -> HostModel:
    """Fit, and put right what programs left out in turn are missed by."""
    events = [_taught(step, counted) for step in steps]
    found = _fit(steps, events, host, counted)
    asked = [row for row, step in enumerate(steps) if step.calls is not None or not counted]
    plain = [row for row in asked if not steps[row].sharded]
    chosen = plain if len(plain) >= LEAST_PROGRAMS else asked
    if len(chosen) < LEAST_PROGRAMS:
        return found
    missed = np.array([
        np.log(steps[left].host_ns / _total(_fit(_without(steps, left), _without(events, left), host, counted),
                                            steps[left]))
        for left in chosen])
    apart = float(missed.std(ddof=1)) * np.sqrt(1 + 1 / len(missed))
    return replace(found, offset=found.offset + float(missed.mean()), spread=Z80 * apart)


def _taught(step: HostStep, counted: bool) -> list[HostMoment]:
    """The events that a program teaches; without calls that others have, those that calls do not change."""
    if counted and step.calls is None:
        return [event for event in host_events(step, False) if is_same_without_calls(event.label)]
    return host_events(step, counted)


def _total(model: HostModel, step: HostStep) -> float:
    return sum(float(part.sum()) for part in model.estimate(step))


def _without(items: Sequence[T], place: int) -> list[T]:
    return [*items[:place], *items[place + 1:]]


def _fit(steps: Sequence[HostStep], events_of: Sequence[Sequence[HostMoment]], host: str, counted: bool) -> HostModel:
    """Fit to steps as they are."""
    rows: dict[Label, dict[int, list[HostMoment]]] = defaultdict(lambda: defaultdict(list))
    for program, mine in enumerate(events_of):
        for event in mine:
            rows[event.label][program].append(event)
    slopes = _slopes(rows)
    size = len(steps)
    # The logarithm of a label's mean in each program that has it, and its weight there.
    value = np.full((len(rows), size), np.nan)
    weight = np.zeros((len(rows), size))
    for row, (label, programs) in enumerate(rows.items()):
        slope = slopes.get(label, slopes[label[:1]])
        for program, events in programs.items():
            usual = sum(_python(event.calls) for event in events)
            mean = sum(max(event.ns / event.cold - slope * event.tensors, 0.0) for event in events) / usual
            value[row, program] = np.log(max(mean, LEAST_NS))
            weight[row, program] = np.sqrt(mean * usual)
    there = ~np.isnan(value)
    several = there.sum(axis=1) > 1
    effect = np.zeros(size)
    for _ in range(ROUNDS if size > 1 else 0):
        base = np.nanmean(value - effect, axis=1, keepdims=True)
        shared = np.where(there & several[:, None], weight, 0.0)
        effect = np.nansum(np.where(there, shared * (value - base), 0.0), axis=0) / np.maximum(shared.sum(axis=0), 1e-9)
        effect -= effect.mean()
    offset, exponent = _programs(effect, np.array([step.compute_us for step in steps]))
    bases, counts = np.nanmean(value - effect, axis=1).tolist(), there.sum(axis=1).tolist()
    pools: dict[Label, list[tuple[float, int]]] = defaultdict(list)
    for label, base, count in zip(rows, bases, counts, strict=True):
        for pool in pools_of(label):
            pools[pool].append((base, count))
    launches = [step.launch_ns for step in steps if step.launch_ns > 0]
    known = {label: Pool(_pooled([base for base, _ in found]), len(found), sum(count for _, count in found))
             for label, found in pools.items()}
    return HostModel(known, slopes, offset, exponent, OTHER_PROGRAM / float(np.sqrt(size)),
                     float(np.median(launches)) if launches else 0.0, size, host, counted)


def _programs(effect: Float64, compute_us: Float64) -> tuple[float, float]:
    """Offset and exponent of programs; fewer than three do not tell how they differ."""
    if len(effect) < LEAST_PROGRAMS - 1 or np.ptp(compute_us) <= 0:
        return float(effect.mean()), 0.0
    exponent, offset = np.polyfit(np.log(compute_us + LEAST_COMPUTE_US), effect, 1)
    return float(offset), float(exponent)


def _pooled(bases: Sequence[float]) -> float:
    size = len(bases)
    middle = sum(bases) / size
    most = middle + math.log(MOST_OF_POOL)
    mean = math.log(sum(math.exp(min(base, most)) for base in bases) / size)
    return MEAN_SHARE * mean + (1 - MEAN_SHARE) * middle


def _python(calls: float) -> float:
    """What so many calls of Python multiply the cost of an event by."""
    return ((calls + FIRST_CALLS) / (USUAL_CALLS + FIRST_CALLS)) ** CALLS_POWER if calls > 0 else 1.0


def _slopes(rows: dict[Label, dict[int, list[HostMoment]]]) -> dict[Label, float]:
    """Least-squares slope over the tensors for each label that has several numbers of them, neither slope nor intercept
    below zero; for all others the median."""
    found: dict[Label, float] = {}
    for label, programs in rows.items():
        x = np.array([event.tensors for events in programs.values() for event in events], np.float64)
        if np.ptp(x) == 0:
            continue
        y = np.array([event.ns / event.cold for events in programs.values() for event in events])
        slope = max(float(np.polyfit(x, y, 1)[0]), 0.0)
        found[label] = slope if y.mean() >= slope * x.mean() else float((x * y).sum() / (x * x).sum())
    for side in ("own", "before"):
        values = [slope for label, slope in found.items() if label[0] == side]
        found[side,] = float(np.median(values)) if values else 0.0
    return found
