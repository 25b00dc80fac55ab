"""``HostModel``: the host time of a step nobody ran, from steps of other programs on the same host.

An event is an operation's own time, or the time before it. In program p the event e, of n tensors, after c calls of
Python functions, costs

    ns = cold(e) · (program(p) · (base(e) + call · c) + slope(e) · n),     cold = exp(0.2 · log₂ max(distance / 32, 1))

*Base*: what is known of the event as it is (an operation in its phase; the time between the same two), drawn towards
what is known of its kind, where few programs have it: ``log base = (n · own + 0.25 · pool) / (n + 0.25)`` over n
programs, pool by pool. *Program*: programs differ as a whole, since computing on the host itself leaves its caches
cold: ``log program = a + b · log(compute + 0.5 µs)``, compute being an operation's in the mean. *Distance*: events
since the same one ran last, around the end of the step. *Tensors*: an optimizer's list operations, and the Python
around them and around the step, cost so much for each tensor. *Calls*: what a model's own Python does between two
operations no name tells; a call costs in proportion to what a view of a tensor does. Where calls were not counted in
all programs, or not in the step in question, c is 0 throughout (``HostModel.counted`` is the fit with them).

Shared overheads as such, means by kind of launch, are from Lin et al. (2022). Constants here were chosen with the
programs of ``traces/record_host.py`` but its ``HELD_OUT``, which accuracy is reported of
(``benchmarks/host_model.py``).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import numpy as np

from kernel_models.host.step_events import END, HostStep, host_class
from kernel_models.spreads import END as Z80
from kernel_models.spreads import OTHER_PROGRAM
from tracer.arrays import Float64
from tracer.decode import DecodeError, convert
from tracer.errors import ForetraceError

WARM_DISTANCE = 32.0
"""Events within which the same one is still in the caches."""
COLDER = 0.2
"""Natural logarithm of the cost's growth for each doubling of the distance beyond."""
POOL_WEIGHT = 0.25
"""Programs that what is known of an event's kind counts for."""
LEAST_NS = 50.0
"""Least base cost that a pool counts."""
MEAN_SHARE = 0.25
"""Share of the mean in a pool's logarithm, the rest of it the mean of logarithms: a few events cost a hundred times the
others of their pool, and a sum needs means."""
LEAST_COMPUTE_US = 0.5
"""Computation of an operation that makes no difference."""
CALL_OF_VIEW = 0.35
"""A call of a Python function over an operation that only makes a view of a tensor."""
LEAST_PROGRAMS = 4
"""So many tell how far others lie from them; fewer take ``spreads.OTHER_PROGRAM``."""
ROUNDS = 8
"""Of fitting bases and programs in turn; three change nothing any more."""

T = TypeVar("T")
Label = tuple[str, ...]
"""Of an event or a pool: "own" or "before", then what tells it apart; fewer words are a wider pool."""


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
        call_ns: of one call of a Python function; 0 where they are not counted.
        counted: the same host, told with the calls; ``None`` where not all of its programs had theirs counted.
    """

    pools: dict[Label, Pool]
    slopes: dict[Label, float]
    offset: float
    exponent: float
    spread: float
    launch_ns: float
    programs: int
    host: str = ""
    call_ns: float = 0.0
    counted: HostModel | None = None

    def suited(self, has_calls: bool) -> HostModel:
        """Return the fit for a step in which calls of Python functions were counted, or were not."""
        return self.counted if has_calls and self.counted is not None else self

    def estimate(self, step: HostStep) -> tuple[Float64, Float64]:
        """Return time before each operation and after the last one, [n + 1], and in each, [n], ns; times in ``step``
        are not looked at."""
        if step.calls is not None and self.counted is not None:
            return self.counted.estimate(step)
        events = _events(step)
        factor = self.factor(step)
        known: dict[Label, tuple[float, float]] = {}
        found = np.zeros(len(events))
        for row, event in enumerate(events):
            if event.label not in known:
                slope = self.slopes.get(event.label, self.slopes.get(event.label[:1], 0.0))
                known[event.label] = factor * self._base(event.label), slope
            base, slope = known[event.label]
            found[row] = event.cold * (base + factor * self.call_ns * event.calls + slope * event.tensors)
        return found[0::2], found[1::2]

    def factor(self, step: HostStep) -> float:
        """Return what the program as a whole multiplies its events' costs by."""
        return float(np.exp(self.offset + self.exponent * np.log(step.compute_us + LEAST_COMPUTE_US)))

    def knows(self, step: HostStep) -> Float64:
        """Return which events, as ``estimate`` orders them (before, in, before, …), are known as they are."""
        return np.array([event.label in self.pools for event in _events(step)], np.float64)

    def _base(self, label: Label) -> float:
        found: float | None = None
        for pool in reversed([*_pools(label), *(_pools(_unsharded(label)) if _is_sharded(label) else ())]):
            if (known := self.pools.get(pool)) is None:
                continue
            count = known.programs if pool == label else known.labels
            found = known.log_base if found is None else (count * known.log_base + POOL_WEIGHT * found) / (
                count + POOL_WEIGHT)
        return 0.0 if found is None else float(np.exp(found))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for a file."""
        return {"host": self.host, "offset": self.offset, "exponent": self.exponent, "spread": self.spread,
                "launch_ns": self.launch_ns, "programs": self.programs, "call_ns": self.call_ns,
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
                   found.launch_ns, found.programs, found.host, found.call_ns,
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
    call_ns: float = 0.0
    counted: _State | None = None


@dataclass(frozen=True, slots=True)
class _Event:
    label: Label
    tensors: int
    cold: float
    ns: float
    calls: float = 0.0


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
    found = _corrected(steps, host)
    if all(step.calls is not None for step in steps):
        return replace(found, counted=_corrected(steps, host, found))
    return found


def _corrected(steps: Sequence[HostStep], host: str, uncounted: HostModel | None = None) -> HostModel:
    """Fit, and put right what programs left out in turn are missed by."""
    events = [_events(step) for step in steps]
    found = _fit(steps, events, host, uncounted)
    if len(steps) < LEAST_PROGRAMS:
        return found
    plain = [row for row, step in enumerate(steps) if not step.sharded]
    chosen = plain if len(plain) >= LEAST_PROGRAMS else range(len(steps))
    missed = np.array([
        np.log(steps[left].host_ns / _total(_fit(_without(steps, left), _without(events, left), host, uncounted),
                                            steps[left]))
        for left in chosen])
    apart = float(missed.std(ddof=1)) * np.sqrt(1 + 1 / len(missed))
    return replace(found, offset=found.offset + float(missed.mean()), spread=Z80 * apart)


def _total(model: HostModel, step: HostStep) -> float:
    return sum(float(part.sum()) for part in model.estimate(step))


def _without(items: Sequence[T], place: int) -> list[T]:
    return [*items[:place], *items[place + 1:]]


def _fit(steps: Sequence[HostStep], events_of: Sequence[Sequence[_Event]], host: str,
         uncounted: HostModel | None) -> HostModel:
    """Fit to steps as they are; where ``uncounted`` tells what operations cost, with their calls of Python."""
    view = None if uncounted is None else uncounted.pools.get(VIEWS)
    call_ns = 0.0 if view is None else CALL_OF_VIEW * math.exp(view.log_base)
    of_calls = [0.0 if uncounted is None else call_ns * uncounted.factor(step) for step in steps]
    rows: dict[Label, dict[int, list[_Event]]] = defaultdict(lambda: defaultdict(list))
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
            mean = sum(max(event.ns / event.cold - slope * event.tensors - of_calls[program] * event.calls, 0.0)
                       for event in events) / len(events)
            value[row, program] = np.log(max(mean, LEAST_NS))
            weight[row, program] = np.sqrt(mean * len(events))
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
        for pool in _pools(label):
            pools[pool].append((base, count))
    launches = [step.launch_ns for step in steps if step.launch_ns > 0]
    known = {label: Pool(_pooled([base for base, _ in found]), len(found), sum(count for _, count in found))
             for label, found in pools.items()}
    return HostModel(known, slopes, offset, exponent, OTHER_PROGRAM / float(np.sqrt(size)),
                     float(np.median(launches)) if launches else 0.0, size, host, call_ns)


def _programs(effect: Float64, compute_us: Float64) -> tuple[float, float]:
    """Offset and exponent of programs; fewer than three do not tell how they differ."""
    if len(effect) < LEAST_PROGRAMS - 1 or np.ptp(compute_us) <= 0:
        return float(effect.mean()), 0.0
    exponent, offset = np.polyfit(np.log(compute_us + LEAST_COMPUTE_US), effect, 1)
    return float(offset), float(exponent)


def _pooled(bases: Sequence[float]) -> float:
    size = len(bases)
    return MEAN_SHARE * math.log(sum(map(math.exp, bases)) / size) + (1 - MEAN_SHARE) * sum(bases) / size


def _slopes(rows: dict[Label, dict[int, list[_Event]]]) -> dict[Label, float]:
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


def _events(step: HostStep) -> list[_Event]:
    """The events of a step in order: before the first operation, in it, before the second one, …, after the last."""
    names, lists = step.name.tolist(), step.tensors.tolist()
    mark = SHARDED if step.sharded else ""
    phases = [f"{phase}{mark}" for phase in step.phase.tolist()]
    most = max(lists, default=0)
    labels: list[Label] = []
    for row, name in enumerate(names):
        phase = phases[row]
        labels += [("before", phase, name, names[row - 1] if row else END), ("own", phase, name)]
    labels.append(("before", f"0{mark}", END, names[-1] if names else END))
    times = np.zeros(len(labels))
    times[0::2], times[1::2] = step.before_ns, step.inside_ns
    count, last = Counter(labels), {label: row for row, label in enumerate(labels)}
    seen: dict[Label, int] = {}
    found = []
    for row, label in enumerate(labels):
        at = row // 2
        beside = lists[at - 1] if at else 0
        own = lists[at] if at < len(lists) else 0
        tensors = own if label[0] == "own" else max(own, beside)
        # What a step begins and ends with, and an optimizer's own Python, go over all tensors.
        if label[0] == "before" and not tensors and count[label] == 1 and (
                END in label[2:] or label[1].startswith(_OPTIMIZER)):
            tensors = most
        distance = row - seen[label] if label in seen else row - last[label] + len(labels)
        seen[label] = row
        cold = float(np.exp(COLDER * np.log2(max(distance / WARM_DISTANCE, 1.0))))
        calls = float(step.calls[at]) if step.calls is not None and label[0] == "before" else 0.0
        found.append(_Event(label, tensors, cold, float(times[row]), calls))
    return found


_OPTIMIZER = "3"
VIEWS = "own", "class view"
SHARDED = "s"
"""Marks phases of programs whose parameters FSDP shards: its hooks and the dispatch of sharded tensors lie around the
same operations. What is known of such programs goes before what is known of others."""


@lru_cache(maxsize=1 << 14)
def _pools(label: Label) -> list[Label]:
    """A label and the pools above it, the nearest first."""
    if label[0] == "own":
        _, phase, name = label
        mine = f"class {host_class(name)}"
        found = [label, ("own", name), ("own", phase, mine), ("own", mine), ("own",)]
    elif label[3] == END:  # the loop's Python, ``zero_grad`` and a model's first lines, whatever operation follows
        found = [label, ("before", "first"), ("before",)]
    else:
        _, phase, name, previous = label
        mine, other = f"class {host_class(name)}", f"class {host_class(previous)}"
        found = [label, ("before", phase, name, other), ("before", phase, name), ("before", phase, mine, other),
                 ("before", phase, mine), ("before", mine), ("before",)]
    if _is_sharded(label):  # of kinds, what is known of all programs is worth more
        return [pool if pool == label else (SHARDED, *pool) for pool in found
                if not any(word.startswith("class ") for word in pool) and len(pool) > 1]
    return found


def _is_sharded(label: Label) -> bool:
    return label[1].endswith(SHARDED)


def _unsharded(label: Label) -> Label:
    return (label[0], label[1].removesuffix(SHARDED), *label[2:])
