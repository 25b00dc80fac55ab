"""Times at sizes nobody recorded: every kind of operation's trend through the captures, put into a scenario.

What does not compute (Python, the dispatcher, launches) follows the step's total work, and is expected to stay; what
computes follows its own work, as the device's models see it, and is expected to grow with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from graph_predictor.prediction.anchoring import OF_HOST, OF_KERNELS, Doubt, Trend, noise_of
from graph_predictor.prediction.new_calls import copied_calls, remade_calls
from graph_predictor.prediction.overheads import computing_operations
from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.sizes.number_laws import NoLawError, NumberLaws
from graph_predictor.sizes.size_kinds import Kind, PairedRank, operation_of_kernels
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of
from kernel_models.pricing import price
from kernel_models.spreads import HOST_AT_CAPTURED, KERNELS_AT_CAPTURED, PER_DISTANCE
from tracer.arrays import Float64, Int64
from tracer.graph import NONE

BATCH = frozenset({"batch", "b", "bs", "batch_size"})
"""Names whose size is a rank's samples."""
LEAST_SPAN = 0.1
"""e-folds of work that the captures are taken to be apart at least."""
ONE_EVENT = 0.3
"""Coefficient of variation that is assumed of what was recorded once."""


@dataclass(frozen=True, slots=True)
class _Work:
    """Logs of the work of every kind in the captures and at the new size, [kinds, captures + 1]; and the calls."""

    log: Float64
    calls: list[list[tuple[OpCall, ...]]]


def at_new_sizes(scenario: Scenario, ranks: list[PairedRank], laws: NumberLaws) -> Scenario:
    """A scenario with the device and host times that the captures' trends give at the new sizes.

    Args:
        scenario: of the edited capture, with ``host_ns`` set.
        ranks: of all captures, the edited one first.
        laws: of the sizes, captures in the same order.

    Raises:
        EditError: a collective's payload follows no law.
    """
    on_cpu = scenario.built.computes_on_host
    kernel_factor = np.ones(len(scenario.built.program.kernel_item))
    calls_of_piece: dict[int, tuple[OpCall, ...]] = {}
    works = [_work_of(scenario, rank) for rank in ranks]
    log_total = np.log(np.maximum(sum(_total(*one) for one in zip(ranks, works, strict=True)), 1e-9))
    at_new = scenario.host_times()
    for rank, work in zip(ranks, works, strict=True):
        _host(scenario, rank, work, log_total, on_cpu, at_new)
        if not on_cpu:
            _device(scenario, rank, work, kernel_factor, calls_of_piece)
    host, device = (_spread(log_total, at) for at in (HOST_AT_CAPTURED, KERNELS_AT_CAPTURED))
    batch = next((size for name, size in laws.new.items() if name.lower() in BATCH), None)
    changed = replace(
        scenario, host=replace(scenario.host.widened(host), ns=at_new),
        items_per_rank=None if batch is None else float(batch))
    if not on_cpu:
        changed = _with_kernels(changed, kernel_factor, calls_of_piece, device)
    sizes = " and ".join(_shown(one, laws.names) for one in laws.sizes)
    grown = np.exp(log_total[-1] - log_total[0])
    return changed.with_note(f"Sizes and times follow laws through captures at {sizes}; the new step is {grown:.2f} "
                             "times the work of the first, by the device's models.")


def _spread(log_total: Float64, at_captured: float) -> float:
    """Log half width of the 80% interval of the laws' times, from the work of the captures and of the new step."""
    captured, new = log_total[:-1], float(log_total[-1])
    nearest = float(np.abs(captured - new).min())
    span = max(float(np.ptp(captured)), LEAST_SPAN)
    outside = max(new - float(captured.max()), float(captured.min()) - new, 0.0)
    return float(np.hypot(at_captured, PER_DISTANCE * nearest * (1.0 + outside / span)))


def _shown(sizes: Mapping[str, int], names: list[str]) -> str:
    return ", ".join(f"{name}={sizes[name]}" for name in names)


def _work_of(scenario: Scenario, rank: PairedRank) -> _Work:
    """Return what the models say of every kind's work; where they know nothing, the elements of its arguments."""
    captures = len(rank.costs)
    counts = np.bincount(rank.kind, minlength=len(rank.kinds))
    first = {int(k): int(row) for row, k in reversed(list(enumerate(rank.kind.tolist())))}
    flat: list[OpCall] = []
    spans: list[list[tuple[int, int]]] = []
    every: list[list[tuple[OpCall, ...]]] = []
    log = np.zeros((len(rank.kinds), captures + 1))
    for number, kind in enumerate(rank.kinds):
        operations = (*kind.recorded, *([kind.recorded[0]] * (captures - len(kind.recorded))), kind.new)
        found = [calls_of(one) for one in operations]
        elements = rank.collective(first[number]) if counts[number] else None
        if elements is not None:
            log[number] = np.log([1.0 + one for one in (*elements, _new_elements(rank, kind, elements))])
        elif not all(found) or any("unsized" in call.flags for calls in found for call in calls):
            log[number] = np.log([1.0 + _elements(one) for one in operations])
        every.append(found)
        spans.append([])
        for calls in found:
            spans[-1].append((len(flat), len(flat) + len(calls)))
            flat += calls
    priced = price(flat, scenario.known_source(), scenario.devices.source_models).times_us if flat else np.zeros(0)
    cumulative = np.concatenate([[0.0], np.cumsum(priced)])
    times = np.array([[cumulative[b] - cumulative[a] for a, b in of] for of in spans]).reshape(log.shape)
    known = (log == 0).all(axis=1) & (times > 0).all(axis=1)
    log[known] = np.log(times[known])
    return _Work(log, every)


def _new_elements(rank: PairedRank, kind: Kind, elements: tuple[int, ...]) -> int:
    try:
        return rank.laws.value(elements)
    except NoLawError as error:
        raise EditError(f"The payload of {kind.name} differs between the captures in a way that was not understood: "
                        f"{error}.") from None


def _elements(operation: Operation) -> float:
    """Elements of all tensors among the arguments."""
    def count(shape: Any) -> float:
        if not shape:
            return 0.0
        return float(np.prod(shape)) if all(isinstance(one, int) for one in shape) else sum(map(count, shape))
    return sum(count(one.shape) for one in operation.arguments)


def _total(rank: PairedRank, work: _Work) -> Float64:
    """Work of a step in every capture and at the new size: measured time of the first × growth by the models."""
    time = rank.costs[0].inside.mean(axis=0) + rank.costs[0].device.mean(axis=0)
    by_kind = np.bincount(rank.kind, weights=time, minlength=len(rank.kinds))
    found: Float64 = (by_kind[:, None] * np.exp(work.log - work.log[:, :1])).sum(axis=0)
    return found


def _means(tables: list[Float64], partner: Int64, kind: Int64, kinds: int, doubt: Doubt) -> tuple[Float64, Float64]:
    """Mean time of one event of each kind in every capture, and the noise of its log, [kinds, captures].

    A place's time is its median over the steps: with three or more, a pause that fell into one of them is left out.
    The noise is what the events of all steps differ by.
    """
    mean, noise = np.zeros((kinds, len(tables))), np.zeros((kinds, len(tables)))
    for number, table in enumerate(tables):
        paired = partner[number] >= 0
        every = table[:, partner[number][paired]]
        group, steps = kind[paired], len(every)
        places = np.bincount(group, minlength=kinds)
        average = np.bincount(group, weights=np.median(every, axis=0), minlength=kinds) / np.maximum(places, 1)
        square = np.bincount(group, weights=((every - average[group]) ** 2).sum(axis=0), minlength=kinds)
        events = steps * places
        variation = np.sqrt(square / np.maximum(events - 1, 1)) / np.maximum(average, 1e-9)
        mean[:, number] = average
        noise[:, number] = noise_of(events.astype(np.float64), np.where(events > 1, variation, ONE_EVENT), doubt)
    return mean, noise


def _times(mean: Float64, noise: Float64, log_work: Float64, slope: Float64, doubt: Doubt) -> Float64:
    """Times by the trend at every captured size and the new one, [captures + 1, kinds]; the first capture's where one
    has no time to follow."""
    known = (mean > 0).all(axis=1)
    safe = np.where(mean > 0, mean, 1.0)
    trend = Trend(np.log(safe), noise, log_work[:, :-1], slope, doubt)
    return np.stack([np.where(known, np.exp(trend.at(at)), mean[:, 0]) for at in log_work.T])


def _host(scenario: Scenario, rank: PairedRank, work: _Work, log_total: Float64, on_cpu: bool,
          at_new: Float64) -> None:
    """Put the times of a rank's host pieces at the new size, by their laws, into ``at_new``."""
    first, kinds = rank.costs[0], len(rank.kinds)
    overall = np.broadcast_to(log_total, (kinds, len(log_total)))
    computes = np.zeros(kinds, np.bool_)
    if on_cpu:
        computes[rank.kind[computing_operations(first.graph)[first.op]]] = True
    inside = _ratios(rank, [one.inside for one in rank.costs],
                     np.where(computes[:, None], work.log, overall), computes.astype(np.float64), OF_HOST)
    # Between operations lie many short times and few pauses: their sum is told, not where a pause falls.
    between = np.array([[float(one.before.sum(axis=1).mean()) for one in rank.costs]])
    expected = _times(between, np.full_like(between, ONE_EVENT), log_total[None, :], np.zeros(1), OF_HOST)[-1, 0]
    recorded = float(between[0, 0])
    before = np.full(len(first) + 1, expected / recorded if recorded > 0 else 1.0)
    at_new *= first.by_piece(scenario.pieces, np.where(rank.paired, inside[rank.kind], 1.0), before, 1.0, 1.0)


def _ratios(rank: PairedRank, tables: list[Float64], log_work: Float64, slope: Float64, doubt: Doubt) -> Float64:
    """Time at the new size over the recorded one of every kind, from tables of the captures, [steps, rows]."""
    kinds = len(rank.kinds)
    times = _times(*_means(tables, rank.partner, rank.kind, kinds, doubt), log_work, slope, doubt)
    recorded = np.bincount(rank.kind, weights=tables[0].mean(axis=0), minlength=kinds)
    expected = times[-1] * np.bincount(rank.kind, minlength=kinds)
    return np.where(recorded > 0, expected / np.maximum(recorded, 1e-9), 1.0)


def _device(scenario: Scenario, rank: PairedRank, work: _Work, factor: Float64,
            calls: dict[int, tuple[OpCall, ...]]) -> None:
    """Factor of every kernel of a rank beyond the ratio of its calls, and the new calls of its pieces."""
    ratio = _ratios(rank, [one.device for one in rank.costs], work.log, np.ones(len(rank.kinds)), OF_KERNELS)
    program, of = scenario.built.program, scenario.work
    low, high = int(program.kernel_ptr[rank.rank]), int(program.kernel_ptr[rank.rank + 1])
    row = np.append(rank.costs[0].of_op, NONE)[operation_of_kernels(scenario, rank.rank)]
    kind = np.where(row >= 0, rank.kind[np.maximum(row, 0)], NONE)
    rows = low + np.arange(high - low)
    factor[rows[kind >= 0]] = ratio[kind[kind >= 0]]
    piece = of.piece[low:high]
    mine = (piece >= 0) & (kind >= 0)
    pairs = np.unique(np.stack([piece[mine], kind[mine]]), axis=1).T if mine.any() else np.zeros((0, 2), np.int64)
    known: dict[tuple[int, int], tuple[OpCall, ...]] = {}
    for one, k in pairs.tolist():
        key = (int(of.group[one]), k)
        if key not in known:
            known[key] = _new_calls(of.calls[key[0]], rank.kinds[k], work.log[k])
        calls[one] = known[key]


def _new_calls(old: tuple[OpCall, ...], kind: Kind, log_work: Float64) -> tuple[OpCall, ...]:
    """Calls of a piece at the new sizes; the old ones where they cannot be made again."""
    copied = copied_calls(old, float(np.exp(log_work[-1] - log_work[0])))
    new = remade_calls(old, kind.recorded[0], kind.new) if copied is None else copied
    return old if new is None else new


def _with_kernels(scenario: Scenario, factor: Float64, new: dict[int, tuple[OpCall, ...]], spread: float) -> Scenario:
    """The new calls of pieces, grouped again, and factors that make up the difference to the measured trend."""
    work = scenario.work
    numbers: dict[tuple[int, tuple[OpCall, ...]], int] = {}
    calls: list[tuple[OpCall, ...]] = []
    after: dict[int, tuple[OpCall, ...]] = {}
    group = np.empty(len(work.group), np.int64)
    for i, number in enumerate(work.group.tolist()):
        wanted = new.get(i, work.calls[number])
        pair = (number, wanted)
        if pair not in numbers:
            numbers[pair] = len(calls)
            calls.append(work.calls[number])
            if wanted != work.calls[number]:
                after[numbers[pair]] = wanted
        group[i] = numbers[pair]
    spec = scenario.known_source()
    explained = np.ones(len(calls))
    for number, wanted in after.items():
        was, will = (float(price(list(one), spec, scenario.devices.source_models).times_us.sum()) if one else 0.0
                     for one in (calls[number], wanted))
        explained[number] = will / was if was > 0 and will > 0 else 1.0
    piece = work.piece
    beyond = factor / np.where(piece >= 0, explained[group[np.maximum(piece, 0)]] if len(group) else 1.0, 1.0)
    kernels = scenario.kernels.scaled(beyond).widened(np.where(factor != 1.0, spread, 0.0))
    return replace(scenario, work=replace(work, calls=calls, group=group),
                   kernels=replace(kernels, calls=after, change_known=True))
