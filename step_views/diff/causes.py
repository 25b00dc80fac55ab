"""Causes of a difference, from the times of two aligned steps.

For every place and resource, ``own`` is its whole time, and ``path`` is the part of it on the critical path. The
changes Δown and Δpath are split into three:

* *moved* is the part of Δpath that Δown explains: the median of 0, Δown and Δpath. It is what a longer operation costs
  where it is exposed, and what a shorter operation saves where it was exposed;
* *shifted* is the rest of Δpath: unchanged work came onto the path or left it;
* *hidden* is the rest of Δown, which does not move the step time.

All three are antisymmetric: comparing B with A gives the same values with the other sign.

A part is shown as the difference of two times: how long the work on the critical path of A or B takes in A and in B.
The machine's share is subtracted from the slower one. A part that exists on one side only has no time on the other
side; the pauses at its place there are subtracted.

A slower host or device is slower everywhere. The ratio ``r`` of comparable work is the weighted median over aligned,
unchanged operations. The machine's share of Δown of every name is (√r − 1/√r) · min(own_A · √r, own_B / √r). It is all
of Δown for a name that follows the ratio. If a name took even longer, the excess is not included; for work of one side
only it is zero. The rest is the operation's. How much of it may be noise follows from the names' deviations from the
ratio (median absolute deviation, in logs), and from the operation's variation between steps.

Time outside operations and time to fetch data cannot be compared, because the work in it is unknown. So it does not
count towards ``r``. Where it changes by the machine's ratio, within the scatter of unchanged work, the machine explains
the change.

All this is computed for the mean step, whose parts add up, and again for *steady* times, the median over the steps of
each place. So an interrupted operation is no cause, and a cause's certainty follows its steady time.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from graph_predictor.recorded.module_paths import is_collective, plain_name
from step_views.diff.places import HunkCause, Places
from step_views.diff.result import UNEXPLAINED, DifferenceKind, Part
from step_views.diff.step_times import Resource
from step_views.diff.step_tree import StepTree, Vocabulary
from tracer.arrays import Float64, Int64
from tracer.graph import Phase

FEWEST = 5
"""Fewest distinct names from which the machine's ratio is computed."""
LONG = 0.95
"""Quantile of operations' times at which the weight for the machine's ratio is cut off."""
SPREADS = 3.0
"""Multiple of unchanged work's median deviation that counts as noise."""
LEAST_SPREAD = 0.05
"""Least noise of unchanged work between two recordings, as a logarithm."""
MAD_TO_SD = 1.4826  # of a normal distribution
COMPARABLE = (DifferenceKind.HOST, DifferenceKind.KERNEL_TIME)
"""Kinds of unchanged work, which can be compared operation by operation."""
CHANGED = (DifferenceKind.SHAPES, DifferenceKind.TYPES, DifferenceKind.KERNELS)
"""Kinds of aligned operations that differ between the two sides."""
DEVICE_WORK = (Resource.COMPUTE, Resource.COPY, Resource.COMMUNICATION)


@dataclass(slots=True)
class Cause:
    """Sums of one cause over places and ranks, ns."""

    time: int = 0
    hidden: int = 0
    before: int = 0
    after: int = 0
    only: DifferenceKind | None = None
    steady: int = 0
    noise: float = 0.0
    places: int = 0
    modules: Counter[str] = field(default_factory=Counter)
    details: Counter[str] = field(default_factory=Counter)
    changes: Counter[str] = field(default_factory=Counter)


Causes = dict[tuple[DifferenceKind, str], Cause]


@dataclass(slots=True)
class CauseTimes:
    """Typical times of a step (ns), [resources × places].

    ``path`` is the time on the critical path, ``own`` the whole time, never less than ``path``.
    """

    path: Int64
    own: Int64
    spread: Int64
    """Median deviation of single steps from ``path``."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """The ratio of times of unchanged work: ``value``, and the deviation of single names from it, as a logarithm."""

    value: float
    spread: float
    known: bool


@dataclass(slots=True)
class Aligned:
    """The aligned typical steps of two programs, for one rank: their trees, places and changes."""

    one: StepTree
    other: StepTree
    places: Places
    hunks: list[HunkCause]
    changes: list[str]
    """The program's change at every place (``changes.place_changes``)."""
    vocabulary: Vocabulary
    before: CauseTimes
    after: CauseTimes
    steady_before: CauseTimes
    steady_after: CauseTimes
    kernels_alike: np.ndarray
    """For every pair: whether the same kernels ran."""
    kernel_names: tuple[list[str], list[str]]
    """For every pair: name of the longest kernel in A and in B; empty if none ran."""
    has_device: bool
    one_machine: bool
    """Whether both were recorded on one kind of machine."""


def add_causes(causes: Causes, aligned: Aligned) -> tuple[Ratio, Ratio]:
    """Add the causes of one rank's difference; return the ratios of the host and of the device."""
    places, before, after = aligned.places, aligned.before, aligned.after
    pairs, size = places.pairs, places.irregular + 1
    shape = (len(Resource), size)
    mean = _Split(before, after, shape, places.end)
    steady = _Split(aligned.steady_before, aligned.steady_after, shape, places.end)
    kinds = _kinds(aligned)
    names = _names(aligned)
    noise = np.zeros(shape)
    ratios = []
    machines: tuple[tuple[tuple[Resource, ...], tuple[DifferenceKind, ...], DifferenceKind], ...] = (
        (
            (Resource.HOST, Resource.GAP),
            (DifferenceKind.HOST, DifferenceKind.GAP, DifferenceKind.LOADER),
            DifferenceKind.WHOLE_HOST,
        ),
        ((Resource.COMPUTE,), (DifferenceKind.KERNEL_TIME,), DifferenceKind.WHOLE_DEVICE),
    )
    for resources, unchanged, whole in machines:
        eligible, comparable = np.zeros(shape, np.bool_), np.zeros(shape, np.bool_)
        for resource in resources:
            eligible[resource, : pairs + 1] = [kind in unchanged for kind in kinds[resource]]
            comparable[resource, :pairs] = [kind in COMPARABLE for kind in kinds[resource][:pairs]]
        eligible[Resource.COMPUTE, pairs] = False  # work launched before the recording
        ratio = _ratio(names, comparable, steady.own_a, steady.own_b)
        ratios.append(ratio)
        # Work that replaces other work is slowed down like that work.
        eligible[list(resources), places.end + 1:places.irregular] = True
        groups = _Groups(eligible, comparable, kinds, names)
        noise += SPREADS * ratio.spread * steady.exposed * groups.shared(steady, ratio, every=aligned.one_machine)
        deviation = (aligned.steady_before.spread + aligned.steady_after.spread).reshape(shape)
        noise += np.where(eligible, SPREADS * deviation, 0.0)
        steady_common, _, _ = steady.take_common(groups, ratio)
        common, hidden_common, middle = mean.take_common(groups, ratio)
        if common or hidden_common:
            begin = round(middle - common / 2)
            _add(causes, (whole, "unchanged work"), common, hidden_common, begin, begin + common,
                 steady=steady_common, places=int(comparable.any(axis=0).sum()))

    vocabulary = aligned.vocabulary
    modules = [vocabulary.texts[m or n] for m, n in zip(
        aligned.other.module[places.right].tolist(), aligned.one.module[places.left].tolist(), strict=True)]
    used = (mean.moved != 0) | (mean.hidden != 0) | (mean.path_a != 0) | (mean.path_b != 0) | (steady.moved != 0)
    for resource, at in zip(*(column.tolist() for column in np.nonzero(used)), strict=True):
        sums = tuple(int(table[resource, at]) for table in (mean.moved, mean.hidden, mean.work_a, mean.work_b))
        sure = int(steady.moved[resource, at])
        if at <= places.end:
            kind, what = kinds[resource][at], names[resource][at]
            detail = ""
            if kind is DifferenceKind.KERNELS:
                detail = f"{aligned.kernel_names[0][at] or 'none'} → {aligned.kernel_names[1][at] or 'none'}"
            _add(causes, (kind, what), *sums, steady=sure, noise=float(noise[resource, at]), places=1, detail=detail,
                 module=modules[at] if at < pairs and kind is not DifferenceKind.LAUNCH else "",
                 change=(aligned.changes[at] or f"{kind.value}: {what}") if kind in CHANGED else "")
        elif at == places.irregular:
            _add(causes, (DifferenceKind.IRREGULAR, "operations of only some steps"), *sums)
        else:
            hunk = aligned.hunks[at - places.of_hunk(0)]
            _add(causes, (hunk.kind, hunk.what), *sums, steady=sure, module=hunk.module, only=hunk.only,
                 change=aligned.changes[at])
    for hunk in aligned.hunks:
        if hunk.counts and (hunk.kind, hunk.what) in causes:
            causes[hunk.kind, hunk.what].places += 1
    _add_shifts(causes, mean)
    return ratios[0], ratios[1]


class _Split:
    """Changed work on the path (moved) and off it (hidden); work that entered it (shifted), ns [resources, places]."""

    def __init__(self, before: CauseTimes, after: CauseTimes, shape: tuple[int, int], end: int) -> None:
        self.path_a, self.path_b = before.path.reshape(shape), after.path.reshape(shape)
        self.own_a, self.own_b = before.own.reshape(shape), after.own.reshape(shape)
        change, of_path = self.own_b - self.own_a, self.path_b - self.path_a
        self.moved = np.clip(of_path, np.minimum(change, 0), np.maximum(change, 0))
        self.shifted, self.hidden = of_path - self.moved, change - self.moved
        self.exposed = np.where(change != 0, self.moved / np.where(change != 0, change, 1),
                                (self.path_a + self.path_b) / np.maximum(self.own_a + self.own_b, 1))
        # A hunk's work exists in one program only, so nothing can have shifted.
        self.moved[:, end + 1:] += self.shifted[:, end + 1:]
        self.hidden[:, end + 1:] -= self.shifted[:, end + 1:]
        self.shifted[:, end + 1:] = 0
        # Work on one side's path alone has a time on the other side's machine too.
        self.work_a = self.path_a + np.maximum(self.shifted, 0)
        self.work_b = self.path_b - np.minimum(self.shifted, 0)

    def take_common(self, groups: _Groups, ratio: Ratio) -> tuple[int, int, float]:
        """Remove the part of the change that a machine with this ratio explains.

        Returns:
            Its sums, moved and hidden, and the mean of both machines' times for the moved work, ns.
        """
        share, middle = groups.share(self, ratio)
        common = np.rint(self.exposed * share).astype(np.int64)
        hidden = np.rint((1 - self.exposed) * share).astype(np.int64)
        self.moved -= common
        self.hidden -= hidden
        return int(common.sum()), int(hidden.sum()), float((self.exposed * middle).sum())


class _Groups:
    """Places that a machine slows down or speeds up, grouped by name (hunks: each by itself).

    A single call may be rounded to 1 µs; the sum over its name is not.
    """

    def __init__(self, eligible: np.ndarray, comparable: np.ndarray, kinds: list[list[DifferenceKind]],
                 names: list[list[str]]) -> None:
        self.rows = np.nonzero(eligible)
        numbers: dict[tuple[DifferenceKind | int, str | int], int] = {}
        group = []
        for resource, at in zip(*(rows.tolist() for rows in self.rows), strict=True):
            known = at < len(kinds[resource])
            key = (kinds[resource][at], names[resource][at]) if known else (resource, at)
            group.append(numbers.setdefault(key, len(numbers)))
        self.group, self.number = np.array(group, np.int64), len(numbers)
        self.bounded = ~self._sums(comparable[self.rows].astype(np.float64)).astype(np.bool_)

    def shared(self, times: _Split, ratio: Ratio, *, every: bool) -> Float64:
        """Return the work that both sides have, by place and resource, on a machine half way between the two, ns.

        ``every`` includes work that cannot be compared: on one machine it varies like operations do.
        """
        found = self._shared(times, ratio)
        return self._spread(times, found if every else np.where(self.bounded, 0.0, found))

    def share(self, times: _Split, ratio: Ratio) -> tuple[Float64, Float64]:
        """Return, by place and resource, the change that the machine explains, and the mean time of the work with that
        change, ns.

        Work that cannot be compared counts as explained up to its actual change, if that follows the machine's ratio.
        """
        shared = self._shared(times, ratio)
        found = (ratio.value**0.5 - ratio.value**-0.5) * shared
        middle = (ratio.value**0.5 + ratio.value**-0.5) / 2 * shared
        before, after = self._sums(times.own_a[self.rows]), self._sums(times.own_b[self.rows])
        strays = np.abs(np.log(np.maximum(after, 1) / np.maximum(before, 1) / ratio.value))
        follows = strays <= SPREADS * max(ratio.spread, LEAST_SPREAD)
        change = np.where(follows, after - before, 0.0)
        explained = np.where(self.bounded, np.clip(found, np.minimum(change, 0), np.maximum(change, 0)), found)
        return self._spread(times, explained), self._spread(times, np.where(self.bounded & ~follows, 0.0, middle))

    def _shared(self, times: _Split, ratio: Ratio) -> Float64:
        half = ratio.value**0.5
        return np.minimum(self._sums(times.own_a[self.rows]) * half, self._sums(times.own_b[self.rows]) / half)

    def _sums(self, values: np.ndarray) -> Float64:
        return np.bincount(self.group, values, self.number).astype(np.float64)

    def _spread(self, times: _Split, of_group: Float64) -> Float64:
        """Distribute the groups' times over their places, in proportion to the places' own times."""
        weight = (times.own_a[self.rows] + times.own_b[self.rows]).astype(np.float64)
        found = np.zeros(times.own_a.shape)
        found[self.rows] = weight * (of_group / np.maximum(self._sums(weight), 1.0))[self.group]
        return found


def _add_shifts(causes: Causes, mean: _Split) -> None:
    """Add unchanged work that came onto the critical path, or left it."""
    device = [int(resource) for resource in DEVICE_WORK]
    host = [int(resource) for resource in Resource if resource not in DEVICE_WORK]
    for rows, what in ((host, "host work"), (device, "device work")):
        if mean.shifted[rows].any():
            shifted = mean.shifted[rows]
            _add(causes, (DifferenceKind.SHIFT, what), int(shifted.sum()), 0, -int(shifted[shifted < 0].sum()),
                 int(shifted[shifted > 0].sum()))


def _add(causes: Causes, key: tuple[DifferenceKind, str], time: int, hidden: int, before: int = 0, after: int = 0, *,
         steady: int = 0, noise: float = 0.0, places: int = 0, module: str = "", detail: str = "",
         only: DifferenceKind | None = None, change: str = "") -> None:
    cause = causes.setdefault(key, Cause(only=only))
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
    if change:
        cause.changes[change] += weight


def add_left_over(causes: Causes, kind: DifferenceKind, what: str, time: int) -> None:
    """Add time that no operation explains, if any."""
    if time:
        _add(causes, (kind, what), time, 0)


def parts_of(causes: Causes, ranks: int, *, one_machine: bool) -> list[Part]:
    """Return the causes as parts of the mean rank's difference, the most certain and largest first. ``causes`` are sums
    over all ranks. On ``one_machine``, a machine that was slower as a whole is no cause in the program, and comes
    after the causes in the program."""
    parts = []
    reached = given = 0
    for (kind, what), cause in causes.items():
        reached += cause.time
        # Rounded so that the parts' sum is the rounded sum.
        time = round(reached / ranks) - given
        given += time
        steady, noise = round(cause.steady / ranks), round(cause.noise / ranks)
        if kind in (DifferenceKind.IRREGULAR, DifferenceKind.REPLAY, DifferenceKind.SHIFT) or (one_machine and kind in (
                DifferenceKind.WHOLE_HOST, DifferenceKind.WHOLE_DEVICE)):
            steady = 0
        detail = cause.details.most_common(1)[0][0] if cause.details else ""
        change = cause.changes.most_common(1)[0][0] if cause.changes else ""
        before, after = (None, None) if kind in UNEXPLAINED else _sides(
            round(cause.before / ranks), round(cause.after / ranks), time, cause.only)
        if cause.only is not None and before is not None and after is not None:
            # The step became shorter where operations were added: the pause at that place became shorter.
            side = "B" if cause.only is DifferenceKind.ADDED else "A"
            kind, what = DifferenceKind.GAP, f"where {side} has {what.removesuffix(f' ({cause.only.value})')}"
        parts.append(Part(
            kind=kind, what=f"{what}: {detail}" if detail else what, module=_module(cause.modules),
            places=-(-cause.places // ranks), time_ns=time, hidden_ns=round(cause.hidden / ranks), before_ns=before,
            after_ns=after, certain_ns=max(0, abs(steady) - noise), change=change, steady_ns=steady,
            noise_ns=noise))
    parts = [part for part in parts if part.time_ns or part.hidden_ns]
    return sorted(parts, key=lambda part: (-part.certain_ns, -abs(part.time_ns), -abs(part.hidden_ns), part.what))


def _sides(before: int, after: int, time: int, only: DifferenceKind | None) -> tuple[int | None, int | None]:
    """Return a part's times in A and in B, ns, whose difference is ``time``; ``None`` for a side without the part.
    ``before`` and ``after`` are its work on the critical path; ``time`` lacks the machine's share of their difference.
    ``only`` is given if one side alone has the part."""
    if only is DifferenceKind.ADDED and time >= 0:
        return None, time
    if only is DifferenceKind.REMOVED and time <= 0:
        return -time, None
    if only is not None:
        before = after = 0
    # The machine's share is subtracted from the larger side.
    excess = after - before - time
    before, after = before + min(excess, 0), after - max(excess, 0)
    lacking = max(0, -before, -after)
    return before + lacking, after + lacking


def _module(modules: Counter[str]) -> str:
    """Return the module; for repeated blocks their common pattern, else the module with most time."""
    if len(modules) < 2:
        return next(iter(modules), "")
    patterns = {re.sub(r"\d+", "*", module) for module in modules}
    return patterns.pop() if len(patterns) == 1 else modules.most_common(1)[0][0]


def _kinds(aligned: Aligned) -> list[list[DifferenceKind]]:
    """Return the kind of difference of every pair and of the end, by resource."""
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
    sizes = (DifferenceKind.SHAPES, DifferenceKind.TYPES)
    host, compute, gap = [], [], []
    for of_size, loads, gathers, alike in zip(by_sizes.tolist(), loading.tolist(), collective.tolist(),
                                              aligned.kernels_alike.tolist(), strict=True):
        of_host = DifferenceKind.HOST if aligned.has_device or of_size == 2 else sizes[of_size]
        host.append(DifferenceKind.LOADER if loads else DifferenceKind.COLLECTIVE if gathers else of_host)
        compute.append(
            sizes[of_size] if of_size < 2 else DifferenceKind.KERNEL_TIME if alike else DifferenceKind.KERNELS
        )
        gap.append(DifferenceKind.GAP)
    number = places.pairs + 1
    table = {
        Resource.HOST: [*host, DifferenceKind.HOST], Resource.COMPUTE: [*compute, DifferenceKind.KERNEL_TIME],
        Resource.COPY: [DifferenceKind.COPY] * number, Resource.COMMUNICATION: [DifferenceKind.COLLECTIVE] * number,
        Resource.LAUNCH: [DifferenceKind.LAUNCH] * number, Resource.SYNC: [DifferenceKind.SYNC] * number,
        Resource.WAITING: [DifferenceKind.WAITING] * number, Resource.LOADING: [DifferenceKind.LOADER] * number,
        Resource.GAP: [*gap, DifferenceKind.GAP],
    }
    return [table[resource] for resource in Resource]


def _names(aligned: Aligned) -> list[list[str]]:
    """Return a cause's name for every pair and for the end, by resource."""
    texts = aligned.vocabulary.texts
    own = [plain_name(texts[code]) for code in aligned.one.name[aligned.places.left].tolist()]
    # All parts of a data loader are one cause.
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


def _ratio(names: list[list[str]], comparable: np.ndarray, own_a: Int64, own_b: Int64) -> Ratio:
    """Return the machine's ratio from comparable work: the median of the operations' ratios, weighted by time.

    Weights are cut at the quantile ``LONG``. A few operations take a hundred times as long as others because they wait
    (a lock, memory mapped again); they say little about the machine.
    """
    rows = np.nonzero(comparable & (own_a > 0) & (own_b > 0))
    named: dict[str, int] = {}
    group = np.array([named.setdefault(names[resource][at], len(named)) for resource, at in zip(
        *(each.tolist() for each in rows), strict=True)], np.int64)
    if len(named) < FEWEST:
        return Ratio(1.0, 0.0, known=False)
    before, after = own_a[rows].astype(np.float64), own_b[rows].astype(np.float64)
    weights = np.sqrt(before * after)
    weights = np.minimum(weights, np.quantile(weights, LONG))
    middle = _weighted_median(np.log(after / before), weights)
    of_names = np.log(np.bincount(group, after) / np.bincount(group, before))
    spread = MAD_TO_SD * _weighted_median(
        np.abs(of_names - middle), np.bincount(group, weights).astype(np.float64))
    return Ratio(float(np.exp(middle)), spread, known=True)


def _weighted_median(values: Float64, weights: Float64) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)])
