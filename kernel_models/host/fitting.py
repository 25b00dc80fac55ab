"""Fits a ``HostModel``. Events of several programs are arrays, so that leaving out each program once is cheap.

::

    events   program · label · cold · calls · tensors · ns.
                        |
    labels   value [labels, programs]: Logarithm of what an event of that label costs warm, in each program.
                        |
    pools    mean of the labels' bases, nearest kind first (``pools_of``).

A host with few recorded programs (``fit_few``) takes the law of other hosts' programs, times one factor, and mixes it
with its own costs::

    law of known hosts ──────────────┐
    programs of this host ─ factor ──┤
                          ─ labels ──┴──▶ base = (n · own + law + factor) / (n + 1), logarithms, n programs have it

Costs of operations relative to each other are similar on two hosts that compute. Hence many programs of other hosts
show more about an operation than a few of the host's own: ``benchmarks/host_few.py`` compares a Xeon's 109 programs
(``traces/host-xeon``) with the law of an EPYC's 52 (``traces/host``). This does not hold where a GPU computes. The
shipped law is fitted to ten traces of six hosts. One or two programs of H100's or MI300's host alone predict a third at
12 and 11% error, with that law at 30 and 24% (``benchmarks/fit_hosts.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kernel_models.host.events import HostMoment, HostStep, Label, host_events, is_same_without_calls, pools_of
from kernel_models.host.model import CPU_HOST, HostModel, Pool, above, drawn_together, python_cost, shipped_host
from kernel_models.spreads import END, OTHER_HOSTS_PROGRAM, OTHER_PROGRAM
from tracer.arrays import Bool, Float64, Int64
from tracer.errors import ForetraceError
from tracer.graph import NONE

LEAST_NS = 50.0
"""Least base cost that a pool counts, ns: chosen, about the resolution of recorded times."""
MEAN_SHARE = 0.25
"""Weight of the mean in a pool's logarithm; the rest is the mean of logarithms. A few events cost many times the others
of their pool, and a sum needs means."""
MOST_OF_POOL = 10.0
"""An event's cost counts in that mean up to this multiple of its pool's middle. A longer event is of another kind (8 ms
of a CPU's ``aten::max`` among launches)."""
LEAST_PROGRAMS = 4
"""Fewest programs that show their own scatter; with fewer ``spreads.OTHER_PROGRAM`` is used."""
ROUNDS = 8
"""Rounds that fit labels and programs alternately. Chosen: further rounds change nothing."""


def fit_host(steps: Sequence[HostStep], host: str = "") -> HostModel:
    """Fit to recorded steps, one of each program.

    Each program is left out once and predicted from the others. The mean error is corrected (sums need means, and pools
    are of logarithms), and the scatter of the errors gives the interval. Where there are enough programs without
    sharded parameters, these alone count.

    Raises:
        ForetraceError: there is no host time in them.
    """
    steps = [step for step in steps if len(step) and step.host_ns > 0]
    if not steps:
        raise ForetraceError("There is no host time to learn from: the captures have no operations on any host thread. "
                             "Profile whole steps, with ProfilerActivity.CPU.")
    found = _corrected(steps, host, False)
    has_calls = sum(step.calls is not None for step in steps)
    hooks = any(step.calls is None and step.sharded for step in steps)  # their time is before operations: needs calls
    if has_calls == len(steps) or (has_calls >= LEAST_PROGRAMS and not hooks):
        return replace(found, counted=_corrected(steps, host, True))
    return found


def _corrected(steps: Sequence[HostStep], host: str, counted: bool) -> HostModel:
    """Fit, and correct the mean error of predictions of programs that are left out once each."""
    events = _Events.of([_taught(step, counted) for step in steps])
    every = np.ones(len(steps), np.bool_)
    launches = [step.launch_ns for step in steps if step.launch_ns > 0]
    found = HostModel(events.pooled(every).named(), events.named_slopes(), 0.0,
                      OTHER_PROGRAM / float(np.sqrt(len(steps))), float(np.median(launches)) if launches else 0.0,
                      len(steps), host, counted)
    asked = [row for row, step in enumerate(steps) if step.calls is not None or not counted]
    plain = [row for row in asked if not steps[row].sharded]
    chosen = plain if len(plain) >= LEAST_PROGRAMS else asked
    if len(chosen) < LEAST_PROGRAMS:
        return found
    missed = np.array([np.log(steps[left].host_ns / events.told(left)) for left in chosen])
    apart = float(missed.std(ddof=1)) * np.sqrt(1 + 1 / len(missed))
    return replace(found, offset=float(missed.mean()), spread=END * apart)


def label_pools(steps: Sequence[HostStep], counted: bool) -> dict[Label, Pool]:
    """Return the measured pool of each event label, without the pools above it. Labels whose cost depends on the number
    of tensors are left out."""
    events = _Events.of([_taught(step, counted) for step in steps])
    sized = np.bincount(events.label, weights=events.tensors, minlength=len(events.value)) > 0
    found = events.pooled(np.ones(len(steps), np.bool_))
    return {found.names[row]: Pool(float(found.log_base[row]), 1, int(events.there[row].sum()))
            for row in np.flatnonzero(~sized).tolist()}


def _taught(step: HostStep, counted: bool) -> list[HostMoment]:
    """Return the events of a program for a fit; without counted calls, only the events that need no calls."""
    if counted and step.calls is None:
        return [event for event in host_events(step, False) if is_same_without_calls(event.label)]
    return host_events(step, counted)


@dataclass(frozen=True, slots=True)
class _Pools:
    """Costs of labels, and of the pools above them, in some programs.

    Attributes:
        names: names of the pools; each label is a pool of its own.
        log_base: log cost of each pool, nan where no program has it.
        labels, programs: number of labels and programs in each pool.
    """

    names: list[Label]
    log_base: Float64
    labels: Int64
    programs: Int64

    def named(self) -> dict[Label, Pool]:
        """Return the pools by name."""
        return {name: Pool(base, labels, programs) for name, base, labels, programs in zip(
            self.names, self.log_base.tolist(), self.labels.tolist(), self.programs.tolist(), strict=True) if labels}


@dataclass(frozen=True, slots=True)
class _Events:
    """Events of all programs.

    Attributes:
        label, program, tensors: Of each event; a label's number is its index in ``pools``.
        cold, python: Factors on each event's cost for cold caches and for its number of Python calls.
        slope: Cost per tensor, ns, by label.
        sloped: Whether a label has a slope of its own.
        value, weight, there: By label and program, [labels, programs]: log cost of an event, its weight where programs
            are compared, and whether there is an event.
        pools: Names of labels, and then of the pools above them.
        own_pools: Pairs of a label and a pool that it belongs to, [pairs, 2].
        chains: For each label its pools, from itself to the widest; -1 at the end; [labels, longest].
    """

    label: Int64
    program: Int64
    tensors: Float64
    cold: Float64
    python: Float64
    slope: Float64
    sloped: Bool
    value: Float64
    weight: Float64
    there: Bool
    pools: list[Label]
    own_pools: Int64
    chains: Int64

    @classmethod
    def of(cls, events_of: Sequence[Sequence[HostMoment]]) -> _Events:
        """Return the events of each program as arrays."""
        numbers: dict[Label, int] = {}
        label = np.array([numbers.setdefault(event.label, len(numbers)) for mine in events_of for event in mine],
                         np.int64)
        program = np.repeat(np.arange(len(events_of)), [len(mine) for mine in events_of])
        tensors, cold, python, ns = np.array(
            [(event.tensors, event.cold, python_cost(event.calls), event.ns) for mine in events_of for event in mine],
            np.float64).reshape(-1, 4).T
        labels, size = list(numbers), len(numbers)
        belongs = [(row, numbers.setdefault(pool, len(numbers))) for row, name in enumerate(labels)
                   for pool in pools_of(name)]
        chains = np.full((size, max(map(len, map(above, labels)))), NONE, np.int64)
        for row, name in enumerate(labels):
            known = [numbers[pool] for pool in above(name) if pool in numbers]
            chains[row, :len(known)] = known
        own = np.array([name[0] == "own" for name in labels])
        slope, sloped = _slopes(label, tensors, ns / cold, own)
        # The logarithm of a label's mean cost in each program that has it, and its weight in that program.
        table, programs = label * len(events_of) + program, len(events_of)
        summed = np.bincount(table, weights=np.maximum(ns / cold - slope[label] * tensors, 0.0),
                             minlength=size * programs).reshape(size, programs)
        usual = np.bincount(table, weights=python, minlength=size * programs).reshape(size, programs)
        there = usual > 0
        mean = summed / np.where(there, usual, 1.0)
        return cls(label, program, tensors, cold, python, slope, sloped, np.log(np.maximum(mean, LEAST_NS)),
                   np.sqrt(mean * usual), there, list(numbers), np.array(belongs, np.int64).reshape(-1, 2), chains)

    def named_slopes(self) -> dict[Label, float]:
        """Return the cost per tensor, ns: by label where fitted, and by side ("own", "before") for all other labels."""
        found = {self.pools[row]: float(self.slope[row]) for row in np.flatnonzero(self.sloped).tolist()}
        for side in ("own", "before"):
            values = [slope for label, slope in found.items() if label[0] == side and len(label) > 1]
            found[side,] = float(np.median(values)) if values else 0.0
        return found

    def pooled(self, kept: Bool) -> _Pools:
        """Return the pools of some programs, after removing each program's overall factor."""
        value = self.value[:, kept]
        there = self.there[:, kept]
        programs = there.sum(axis=1)
        shared = np.where(there & (programs > 1)[:, None], self.weight[:, kept], 0.0)
        effect = np.zeros(value.shape[1])
        count = np.maximum(programs, 1)
        for _ in range(ROUNDS if len(effect) > 1 else 0):
            base = np.where(there, value - effect, 0.0).sum(axis=1) / count
            effect = (shared * (value - base[:, None])).sum(axis=0) / np.maximum(shared.sum(axis=0), 1e-9)
            effect -= effect.mean()
        base = np.where(there, value - effect, 0.0).sum(axis=1) / count
        pairs = self.own_pools[programs[self.own_pools[:, 0]] > 0]
        of, pool, size = base[pairs[:, 0]], pairs[:, 1], len(self.pools)
        labels = np.bincount(pool, minlength=size)
        several = np.maximum(labels, 1)
        middle = np.bincount(pool, weights=of, minlength=size) / several
        most = np.exp(np.minimum(of, middle[pool] + math.log(MOST_OF_POOL)))
        mean = np.log(np.maximum(np.bincount(pool, weights=most, minlength=size) / several, 1e-9))
        log_base = np.where(labels > 0, MEAN_SHARE * mean + (1 - MEAN_SHARE) * middle, np.nan)
        of_programs = np.bincount(pool, weights=programs[pairs[:, 0]], minlength=size).astype(np.int64)
        return _Pools(self.pools, log_base, labels, of_programs)

    def told(self, left: int) -> float:
        """Return the host time of one program as predicted from all others, ns."""
        pools = self.pooled(np.arange(self.value.shape[1]) != left)
        mine = self.program == left
        label = self.label[mine]
        base: Float64 = np.full(len(self.value), np.nan)
        for place in reversed(range(self.chains.shape[1])):
            pool = self.chains[:, place]
            count = np.where(pool == np.arange(len(pool)), pools.programs[pool], pools.labels[pool])
            known = (pool != NONE) & (pools.labels[pool] > 0)
            drawn = np.where(np.isnan(base), pools.log_base[pool],
                             drawn_together(count, pools.log_base[pool], np.nan_to_num(base)))
            base = np.where(known, drawn, base)
        warm = np.nan_to_num(np.exp(base))[label] * self.python[mine] + self.slope[label] * self.tensors[mine]
        return float((self.cold[mine] * warm).sum())


def _slopes(label: Int64, tensors: Float64, ns: Float64, own: Bool) -> tuple[Float64, Bool]:
    """Return each label's slope over tensors, and which slopes are fitted: for labels with several numbers of tensors
    (by least squares, slope and intercept ≥ 0). All others take the median of their side, own or before."""
    size = len(own)
    count = np.maximum(np.bincount(label, minlength=size), 1)
    x, y, xx, xy = (np.bincount(label, weights=each, minlength=size) / count
                    for each in (tensors, ns, tensors * tensors, tensors * ns))
    least, most = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(least, label, tensors)
    np.maximum.at(most, label, tensors)
    sloped = most > least
    variance = np.where(sloped, xx - x * x, 1.0)
    found = np.maximum((xy - x * y) / variance, 0.0)
    found = np.where(y >= found * x, found, xy / np.where(sloped, xx, 1.0))
    for side in (own, ~own):
        values = found[side & sloped]
        found[side & ~sloped] = float(np.median(values)) if len(values) else 0.0
    return found, sloped


ENOUGH_PROGRAMS = 10
"""From this number of programs on, a host's own programs predict others as well as with the model of other hosts
(``benchmarks/host_few.py``)."""


def fit_few(steps: Sequence[HostStep], host: str = "", law: HostModel | None = None) -> HostModel:
    """Fit to recorded steps of one host, one of each program, starting from the model of other hosts (``law``).

    Args:
        steps: steps of the programs, which compute on the host.
        host: name of the host.
        law: model of other hosts; default: the shipped one.

    Raises:
        ForetraceError: there is no host time in them.
    """
    own = fit_host(steps, host)
    law = law or shipped_host(CPU_HOST)
    steps = [step for step in steps if len(step) and step.host_ns > 0]
    plain = _drawn(own, replace(law, counted=None), [replace(step, calls=None) for step in steps])
    counted = [step for step in steps if step.calls is not None]
    if own.counted is None or law.counted is None or len(counted) < len(steps):
        return plain
    return replace(plain, counted=_drawn(own.counted, law.counted, counted))


def _drawn(own: HostModel, law: HostModel, steps: Sequence[HostStep]) -> HostModel:
    """Return ``law`` scaled to the host, mixed with its own programs, and corrected by left-out programs."""
    count = len(steps)
    factors = np.array([_missed(law, step) for step in steps])
    model = _drawn_to(own, law, steps, factors)
    missed = np.array([_missed(_drawn_to(own, law, [*steps[:left], *steps[left + 1:]], np.delete(factors, left)),
                               steps[left]) for left in range(count)]) if count > 1 else np.zeros(1)
    # Few programs may agree, or err on one side, by chance: the usual scatter counts like ``LEAST_PROGRAMS`` of them.
    usual = max(OTHER_HOSTS_PROGRAM, law.spread / END)
    apart = np.sqrt((((missed - missed.mean())**2).sum() + LEAST_PROGRAMS * usual**2) / (count - 1 + LEAST_PROGRAMS))
    offset = float(missed.mean()) * count / (count + LEAST_PROGRAMS)
    return replace(model, offset=law.offset + offset, spread=END * float(apart) * float(np.sqrt(1 + 1 / count)))


def _missed(model: HostModel, step: HostStep) -> float:
    """Return the log of a program's time over the model's prediction."""
    return float(np.log(step.host_ns / sum(float(part.sum()) for part in model.estimate(step))))


def _drawn_to(own: HostModel, law: HostModel, steps: Sequence[HostStep], factors: Float64) -> HostModel:
    """Return ``law`` scaled by the programs' median factor, mixed with their cost of each operation. ``own`` gives the
    name, launches and number of programs."""
    # The median: one odd program, such as one whose Python does most of its work, moves the mean of five by a tenth.
    factor = float(np.median(factors))
    pools = {label: replace(pool, log_base=pool.log_base + factor) for label, pool in law.pools.items()}
    for label, mine in label_pools(steps, law.with_calls).items():
        known = law.pools.get(label)
        base = law.log_base(label)
        if base is None:
            pools[label] = mine
            continue
        drawn = drawn_together(float(mine.programs), mine.log_base, base + factor)
        pools[label] = Pool(drawn, 1, mine.programs + (known.programs if known else 1))
    slopes = {label: slope * float(np.exp(factor)) for label, slope in law.slopes.items()}
    return replace(own, pools=pools, slopes=slopes, offset=law.offset, with_calls=law.with_calls, counted=None)


@dataclass(frozen=True, slots=True)
class ToldHost:
    """One program's host time, ns per step, measured and predicted by a model.

    Attributes:
        known: share of the measured time in events whose own label the model has.
        within: whether the measured time lies in the model's 80% interval.
    """

    name: str
    measured_ns: float
    told_ns: float
    known: float
    within: bool

    @property
    def error(self) -> float:
        """Return the predicted over the measured time, minus one."""
        return self.told_ns / self.measured_ns - 1


def told(name: str, step: HostStep, model: HostModel) -> ToldHost:
    """Return a model's prediction of a measured step, with the measurement."""
    before, inside = model.estimate(step)
    total = float(before.sum() + inside.sum())
    spent = np.empty(len(before) + len(inside))
    spent[0::2], spent[1::2] = step.before_ns, step.inside_ns
    return ToldHost(name, step.host_ns, total, float(spent @ model.knows(step)) / step.host_ns,
                    abs(np.log(total / step.host_ns)) <= model.suited(step.calls is not None).spread)


def left_out(steps: Mapping[str, HostStep]) -> list[ToldHost]:
    """Return each program as predicted by a fit to all others. Raises ``ForetraceError`` as ``fit_host``."""
    return [told(name, step, fit_host([other for key, other in steps.items() if key != name]))
            for name, step in steps.items()]
