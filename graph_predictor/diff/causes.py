"""From the times of two aligned steps to causes.

Of every place and resource it is known how long it took altogether, ``own``, and how much of that lay on the critical
path. With the changes Δown and Δpath,

* *moved* is as much of Δpath as Δown explains, the middle one of 0, Δown and Δpath: what an operation that got longer
  costs where it is exposed, what one that got shorter saves where it was;
* *shifted* is the rest of Δpath: the same work came onto the path or left it;
* *hidden* is the rest of Δown: it moves nothing.

All three are antisymmetric: B against A gives the same with the other sign.

A host or a device that is slower altogether is slower everywhere. The ratio ``r`` of unchanged work, the weighted
median over the names of operations, gives the machine's part of Δown: (r − 1)/(r + 1) · (own_A + own_B), which for a
place that follows the ratio is all of it; where operations were replaced, (√r − 1/√r) · min(own_A · √r, own_B / √r),
which is nothing for what was only added. What is left is the operation's. How far names stray from the ratio (the
median absolute deviation, in logs), and the operation from step to step, says how much of that could be the
measurement.

All of it is done for the mean step, whose parts add up, and once more for *steady* times, of each place the median over
the steps: an interrupted operation is no cause, and how sure a cause is goes by its steady time.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from graph_predictor.diff.hunks import HunkCause
from graph_predictor.diff.names import is_collective, plain_name
from graph_predictor.diff.places import Places
from graph_predictor.diff.result import Kind, Part
from graph_predictor.diff.step_times import Resource
from graph_predictor.diff.step_tree import StepTree, Vocabulary
from graph_predictor.program import Float64, Int64
from tracer.graph import Phase

FEWEST = 5
"""From fewer distinct names nothing is said of the machine."""
SPREADS = 3.0
"""So many median deviations of unchanged work are taken for its noise."""
MAD_TO_SD = 1.4826
DEVICE_WORK = (Resource.COMPUTE, Resource.COPY, Resource.COMMUNICATION)


@dataclass(slots=True)
class Cause:
    """Sums of one cause over places and ranks, ns."""

    time: int = 0
    hidden: int = 0
    before: int = 0
    after: int = 0
    steady: int = 0
    noise: float = 0.0
    places: int = 0
    modules: Counter[str] = field(default_factory=Counter)
    details: Counter[str] = field(default_factory=Counter)


Causes = dict[tuple[Kind, str], Cause]


@dataclass(slots=True)
class Times:
    """Typical times of a step (ns), [resources × places].

    ``path`` is on the critical path, ``own`` altogether, and never less than ``path``.
    """

    path: Int64
    own: Int64
    spread: Int64
    """Of ``path``: the median deviation of single steps."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """How much longer unchanged work takes: ``value``, and the deviation of single names from it, in logs."""

    value: float
    spread: float
    known: bool


@dataclass(slots=True)
class Aligned:
    """Two programs' typical steps of one rank, and everything that says what is where."""

    one: StepTree
    other: StepTree
    places: Places
    hunks: list[HunkCause]
    vocabulary: Vocabulary
    before: Times
    after: Times
    steady_before: Times
    steady_after: Times
    kernels_alike: np.ndarray
    """Of every pair: whether the same kernels ran."""
    kernel_names: tuple[list[str], list[str]]
    """Of every pair the longest kernel's name, in A and in B; empty where none ran."""
    has_device: bool


def add_causes(causes: Causes, aligned: Aligned) -> tuple[Ratio, Ratio]:
    """Add the causes of one rank's difference; returns the ratios of the host and of the device."""
    places, before, after = aligned.places, aligned.before, aligned.after
    pairs, size = places.pairs, places.irregular + 1
    shape = (len(Resource), size)
    mean = _Split(before, after, shape, places.end)
    steady = _Split(aligned.steady_before, aligned.steady_after, shape, places.end)
    kinds = _kinds(aligned)
    names = _names(aligned)
    noise = np.zeros(shape)
    ratios = []
    machines: tuple[tuple[tuple[Resource, ...], tuple[Kind, ...], Kind], ...] = (
        ((Resource.HOST, Resource.GAP), (Kind.HOST, Kind.GAP, Kind.LOADER), Kind.WHOLE_HOST),
        ((Resource.COMPUTE,), (Kind.KERNEL_TIME,), Kind.WHOLE_DEVICE))
    for resources, unchanged, whole in machines:
        eligible = np.zeros(shape, np.bool_)
        for resource in resources:
            eligible[resource, : pairs + 1] = [kind in unchanged for kind in kinds[resource]]
        eligible[Resource.COMPUTE, pairs] = False  # what was launched before the recording
        ratio = _ratio(names, eligible, steady.own_a, steady.own_b)
        ratios.append(ratio)
        # What replaces something was slowed down as that was.
        eligible[list(resources), places.end + 1:places.irregular] = True
        noise += np.where(eligible, SPREADS * ratio.spread * steady.exposed * steady.shared(ratio, places.end), 0.0)
        deviation = (aligned.steady_before.spread + aligned.steady_after.spread).reshape(shape)
        noise += np.where(eligible, SPREADS * deviation, 0.0)
        steady_common, _ = steady.take_common(ratio, eligible, places.end)
        common, hidden_common = mean.take_common(ratio, eligible, places.end)
        if common or hidden_common:
            _add(causes, (whole, "unchanged work"), common, hidden_common, int(mean.path_a[eligible].sum()),
                 int(mean.path_b[eligible].sum()), steady=steady_common,
                 places=int(eligible[:, :pairs].any(axis=0).sum()))

    vocabulary = aligned.vocabulary
    modules = [vocabulary.texts[m or n] for m, n in zip(
        aligned.other.module[places.right].tolist(), aligned.one.module[places.left].tolist(), strict=True)]
    used = (mean.moved != 0) | (mean.hidden != 0) | (mean.path_a != 0) | (mean.path_b != 0) | (steady.moved != 0)
    for resource, at in zip(*(column.tolist() for column in np.nonzero(used)), strict=True):
        sums = tuple(int(table[resource, at]) for table in (mean.moved, mean.hidden, mean.path_a, mean.path_b))
        sure = int(steady.moved[resource, at])
        if at <= places.end:
            kind, what = kinds[resource][at], names[resource][at]
            detail = ""
            if kind is Kind.KERNELS:
                detail = f"{aligned.kernel_names[0][at] or 'none'} → {aligned.kernel_names[1][at] or 'none'}"
            _add(causes, (kind, what), *sums, steady=sure, noise=float(noise[resource, at]), places=1, detail=detail,
                 module=modules[at] if at < pairs and kind is not Kind.LAUNCH else "")
        elif at == places.irregular:
            _add(causes, (Kind.IRREGULAR, "operations of only some steps"), *sums)
        else:
            hunk = aligned.hunks[at - places.of_hunk(0)]
            _add(causes, (hunk.kind, hunk.what), *sums, steady=sure, module=hunk.module)
    for hunk in aligned.hunks:
        if hunk.counts and (hunk.kind, hunk.what) in causes:
            causes[hunk.kind, hunk.what].places += 1
    _add_shifts(causes, mean)
    return ratios[0], ratios[1]


class _Split:
    """The change of every place and resource told apart, [resources, places], ns (see the module's text)."""

    def __init__(self, before: Times, after: Times, shape: tuple[int, int], end: int) -> None:
        self.path_a, self.path_b = before.path.reshape(shape), after.path.reshape(shape)
        self.own_a, self.own_b = before.own.reshape(shape), after.own.reshape(shape)
        change, of_path = self.own_b - self.own_a, self.path_b - self.path_a
        self.moved = np.clip(of_path, np.minimum(change, 0), np.maximum(change, 0))
        self.shifted, self.hidden = of_path - self.moved, change - self.moved
        self.exposed = np.where(change != 0, self.moved / np.where(change != 0, change, 1),
                                (self.path_a + self.path_b) / np.maximum(self.own_a + self.own_b, 1))
        # A hunk's work is of one program only: there is nothing that could have shifted.
        self.moved[:, end + 1:] += self.shifted[:, end + 1:]
        self.hidden[:, end + 1:] -= self.shifted[:, end + 1:]
        self.shifted[:, end + 1:] = 0

    def shared(self, ratio: Ratio, end: int) -> Float64:
        """The work both have, on a machine half way between the two, ns; of hunks, behind ``end``, the smaller one."""
        half = ratio.value**0.5
        work = (self.own_a + self.own_b) / (half + 1 / half)
        work[:, end + 1:] = np.minimum(self.own_a * half, self.own_b / half)[:, end + 1:]
        return work

    def take_common(self, ratio: Ratio, eligible: np.ndarray, end: int) -> tuple[int, int]:
        """Take out what a machine with this ratio explains; returns the sums of it, moved and hidden."""
        share = (ratio.value**0.5 - ratio.value**-0.5) * self.shared(ratio, end)
        common = np.where(eligible, np.rint(self.exposed * share), 0).astype(np.int64)
        hidden = np.where(eligible, np.rint((1 - self.exposed) * share), 0).astype(np.int64)
        self.moved -= common
        self.hidden -= hidden
        return int(common.sum()), int(hidden.sum())


def _add_shifts(causes: Causes, mean: _Split) -> None:
    """Work as long as before that came onto the critical path, or left it."""
    device = [int(resource) for resource in DEVICE_WORK]
    host = [int(resource) for resource in Resource if resource not in DEVICE_WORK]
    for rows, what in ((host, "host work"), (device, "device work")):
        if mean.shifted[rows].any():
            _add(causes, (Kind.SHIFT, what), int(mean.shifted[rows].sum()), 0, int(mean.path_a[rows].sum()),
                 int(mean.path_b[rows].sum()))


def _add(causes: Causes, key: tuple[Kind, str], time: int, hidden: int, before: int = 0, after: int = 0, *,
         steady: int = 0, noise: float = 0.0, places: int = 0, module: str = "", detail: str = "") -> None:
    cause = causes.setdefault(key, Cause())
    cause.time += time
    cause.hidden += hidden
    cause.before += before
    cause.after += after
    cause.steady += steady
    cause.noise += noise
    cause.places += places
    weight = abs(time) + abs(hidden)
    if module:
        cause.modules[module] += weight
    if detail:
        cause.details[detail] += weight


def add_left_over(causes: Causes, kind: Kind, what: str, time: int) -> None:
    """Add what no operation explains, where there is any."""
    if time:
        _add(causes, (kind, what), time, 0)


def parts_of(causes: Causes, ranks: int, *, one_machine: bool) -> list[Part]:
    """The causes as parts of the mean rank's difference, what most certainly matters first.

    Args:
        causes: of all ranks together.
        ranks: how many.
        one_machine: whether both were recorded on the same kind of machine. Then a machine that was slower altogether
            is no cause in the program, and comes after those that are.
    """
    parts = []
    reached = given = 0
    for (kind, what), cause in causes.items():
        reached += cause.time
        # Rounded so that the parts add up to the rounded sum.
        time = round(reached / ranks) - given
        given += time
        certain = max(0, round((abs(cause.steady) - cause.noise) / ranks))
        if kind in (Kind.IRREGULAR, Kind.REPLAY, Kind.SHIFT) or (one_machine and kind in (
                Kind.WHOLE_HOST, Kind.WHOLE_DEVICE)):
            certain = 0
        detail = cause.details.most_common(1)[0][0] if cause.details else ""
        parts.append(Part(
            kind=kind, what=f"{what}: {detail}" if detail else what, module=_module(cause.modules),
            places=-(-cause.places // ranks), time_ns=time, hidden_ns=round(cause.hidden / ranks),
            before_ns=round(cause.before / ranks), after_ns=round(cause.after / ranks), certain_ns=certain))
    parts = [part for part in parts if part.time_ns or part.hidden_ns]
    return sorted(parts, key=lambda part: (-part.certain_ns, -abs(part.time_ns), -abs(part.hidden_ns), part.what))


def _module(modules: Counter[str]) -> str:
    """The module, or what repeated blocks have in common, or the one with most of the time."""
    if len(modules) < 2:
        return next(iter(modules), "")
    patterns = {re.sub(r"\d+", "*", module) for module in modules}
    return patterns.pop() if len(patterns) == 1 else modules.most_common(1)[0][0]


def _kinds(aligned: Aligned) -> list[list[Kind]]:
    """Kind of every pair and of the end, for each resource."""
    one, other, places = aligned.one, aligned.other, aligned.places
    left, right = places.left, places.right

    def changed(column: str) -> np.ndarray:
        a, b = getattr(one, column)[left], getattr(other, column)[right]
        return np.asarray((a != b) & (a > 0) & (b > 0))

    shapes, types = changed("shapes"), changed("dtypes")
    loading = one.loading[left] | (one.phase[left] == Phase.DATA) | (other.phase[right] == Phase.DATA)
    codes = [i for i, text in enumerate(aligned.vocabulary.texts) if is_collective(text)]
    collective = np.isin(one.name[left], codes)
    by_sizes = np.select([shapes, types], [0, 1], 2)
    sizes = (Kind.SHAPES, Kind.TYPES)
    host, compute, gap = [], [], []
    for of_size, loads, gathers, alike in zip(by_sizes.tolist(), loading.tolist(), collective.tolist(),
                                              aligned.kernels_alike.tolist(), strict=True):
        of_host = Kind.HOST if aligned.has_device or of_size == 2 else sizes[of_size]
        host.append(Kind.LOADER if loads else Kind.COLLECTIVE if gathers else of_host)
        compute.append(sizes[of_size] if of_size < 2 else Kind.KERNEL_TIME if alike else Kind.KERNELS)
        gap.append(Kind.GAP)
    number = places.pairs + 1
    table = {
        Resource.HOST: [*host, Kind.HOST], Resource.COMPUTE: [*compute, Kind.KERNEL_TIME],
        Resource.COPY: [Kind.COPY] * number, Resource.COMMUNICATION: [Kind.COLLECTIVE] * number,
        Resource.LAUNCH: [Kind.LAUNCH] * number, Resource.SYNC: [Kind.SYNC] * number,
        Resource.WAITING: [Kind.WAITING] * number, Resource.LOADING: [Kind.LOADER] * number,
        Resource.GAP: [*gap, Kind.GAP],
    }
    return [table[resource] for resource in Resource]


def _names(aligned: Aligned) -> list[list[str]]:
    """What a cause at every pair, and at the end, is called, for each resource."""
    texts = aligned.vocabulary.texts
    own = [plain_name(texts[code]) for code in aligned.one.name[aligned.places.left].tolist()]
    # A loader's parts are one cause.
    loading = aligned.one.loading[aligned.places.left].tolist()
    host = ["fetching a batch" if loads else name for name, loads in zip(own, loading, strict=True)]
    before = [*(f"before {name}" for name in own), "after the last operation"]
    named = {
        Resource.HOST: [*host, "outside operations"], Resource.LAUNCH: ["launch calls and latencies"] * len(before),
        Resource.WAITING: ["a later rank"] * len(before), Resource.LOADING: ["waiting for a batch"] * len(before),
        Resource.GAP: before,
    }
    earlier = [*own, "work launched before the recording"]
    return [named.get(resource, earlier) for resource in Resource]


def _ratio(names: list[list[str]], eligible: np.ndarray, own_a: Int64, own_b: Int64) -> Ratio:
    """How much longer unchanged work takes, by name of operation."""
    sums: dict[str, list[float]] = {}
    for resource, at in zip(*(column.tolist() for column in np.nonzero(eligible)), strict=True):
        known = sums.setdefault(names[resource][at], [0.0, 0.0])
        known[0] += float(own_a[resource, at])
        known[1] += float(own_b[resource, at])
    both = np.array([each for each in sums.values() if each[0] > 0 and each[1] > 0], np.float64).reshape(-1, 2)
    if len(both) < FEWEST:
        return Ratio(1.0, 0.0, known=False)
    logs, weights = np.log(both[:, 1] / both[:, 0]), np.sqrt(both[:, 0] * both[:, 1])
    middle = _weighted_median(logs, weights)
    spread = MAD_TO_SD * _weighted_median(np.abs(logs - middle), weights)
    return Ratio(float(np.exp(middle)), spread, known=True)


def _weighted_median(values: Float64, weights: Float64) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
