"""Times at sizes nobody recorded: every kind of operation's trend through the captures, put into a scenario.

::

    shapes: one capture scaled, or the laws of several        kinds of operations, recorded and new (``size_kinds``)
    times: what each took                                     the table of costs of each capture (``operation_costs``)
    ──▶ anchoring (``prediction.anchoring``)                  through one capture the models' ratio, else a trend

What does not compute (Python, the dispatcher, launches) follows the step's total work, and is expected to stay; what
computes follows its own work, as the device's models see it, and is expected to grow with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from graph_predictor.prediction.anchoring import (
    OF_HOST,
    OF_KERNELS,
    Doubt,
    Trend,
    anchored,
    noise_of,
    prices_of,
    resized_calls,
    trend_spread,
)
from graph_predictor.prediction.operation_costs import computing_operations
from graph_predictor.prediction.scenario import Scenario
from graph_predictor.sizes.number_laws import NumberLaws
from graph_predictor.sizes.size_kinds import ResizedRank, operation_of_kernels
from kernel_models.op_call import OpCall
from kernel_models.operation import Operation, calls_of, is_free
from kernel_models.spreads import HOST_AT_CAPTURED, KERNELS_AT_CAPTURED
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import NONE

BATCH = frozenset({"batch", "b", "bs", "batch_size"})
"""Names whose size is a rank's samples."""
ONE_EVENT = 0.3
"""Coefficient of variation that is assumed of what was recorded once."""


def at_new_sizes(scenario: Scenario, ranks: Sequence[ResizedRank], laws: NumberLaws) -> Scenario:
    """A scenario with the device and host times that the captures' trends give at the new sizes.

    Args:
        scenario: of the edited capture, with ``host_ns`` set.
        ranks: of all captures, the edited one first.
        laws: of the sizes, captures in the same order.

    Raises:
        EditError: a collective's payload follows no law.
    """
    kernel_factor = np.ones(len(scenario.built.program.kernel_item))
    calls = [scenario.work.calls[number] for number in scenario.work.call_row.tolist()]
    works = [log_work(scenario, rank) for rank in ranks]
    log_total = np.log(np.maximum(sum(_total(*one) for one in zip(ranks, works, strict=True)), 1e-9))
    at_new = scenario.host_times()
    for rank, work in zip(ranks, works, strict=True):
        at_new *= host_factors(scenario, rank, work, log_total)
        if not scenario.built.computes_on_host:
            _device(scenario, rank, work, kernel_factor, calls)
    host, device = (trend_spread(log_total, at) for at in (HOST_AT_CAPTURED, KERNELS_AT_CAPTURED))
    batch = next((size for name, size in laws.new.items() if name.lower() in BATCH), None)
    changed = replace(
        scenario, host=replace(scenario.host.widened(host), ns=at_new),
        items_per_rank=None if batch is None else float(batch))
    if not scenario.built.computes_on_host:
        changed = _with_kernels(changed, kernel_factor, calls, device)
    sizes = " and ".join(_shown(one, laws.names) for one in laws.sizes)
    grown = np.exp(log_total[-1] - log_total[0])
    return changed.with_note(f"Sizes and times follow laws through captures at {sizes}; the new step is {grown:.2f} "
                             "times the work of the first, by the device's models.")


def _shown(sizes: Mapping[str, int], names: list[str]) -> str:
    return ", ".join(f"{name}={sizes[name]}" for name in names)


def log_work(scenario: Scenario, rank: ResizedRank) -> Float64:
    """Logs of the work of every kind in the captures and at the new size, [kinds, captures + 1].

    It is what the models say of it; where they know nothing, the elements of its arguments.
    """
    captures = len(rank.costs)
    operations = [(*kind.recorded, *([kind.recorded[0]] * (captures - len(kind.recorded))), kind.new)
                  for kind in rank.kinds]
    calls = [calls_of(one) for versions in operations for one in versions]
    times = prices_of(calls, scenario.known_source(), scenario.devices.source_models).time_us
    times = times.reshape(-1, captures + 1)
    sized = np.array([bool(one) and not any("unsized" in call.flags for call in one) for one in calls], np.bool_)
    known: Bool = np.asarray((sized.reshape(times.shape) & (times > 0)).all(axis=1))
    _, first = np.unique(rank.kind, return_index=True)
    collectives = frozenset(op for one in rank.costs for op in one.of_op[one.graph.collectives.op].tolist())
    found = np.log(np.where(known[:, None], times, 1.0))
    for number, row in enumerate(first.tolist()):
        elements = rank.collective(row) if row in collectives else None
        if elements is not None:
            found[number] = np.log1p(elements)
        elif not known[number]:
            found[number] = np.log1p([_elements(one) for one in operations[number]])
    return found


def _elements(operation: Operation) -> float:
    """Elements of all tensors among the arguments."""
    def count(shape: Any) -> float:
        if not shape:
            return 0.0
        return float(np.prod(shape)) if all(isinstance(one, int) for one in shape) else sum(map(count, shape))
    return sum(count(one.shape) for one in operation.arguments)


def _total(rank: ResizedRank, work: Float64) -> Float64:
    """Work of a step in every capture and at the new size: measured time of the first × growth by the models."""
    time = rank.costs[0].inside.mean(axis=0) + rank.costs[0].device.mean(axis=0)
    by_kind = np.bincount(rank.kind, weights=time, minlength=len(rank.kinds))
    found: Float64 = (by_kind[:, None] * np.exp(work - work[:, :1])).sum(axis=0)
    return found


def _means(tables: list[Float64], partner: Int64, kind: Int64, kinds: int, doubt: Doubt) -> tuple[Float64, Float64]:
    """Mean time of one event of each kind in every capture, and the noise of its log, [kinds, captures]: what the
    events of all steps differ by."""
    mean, noise = np.zeros((kinds, len(tables))), np.zeros((kinds, len(tables)))
    for number, table in enumerate(tables):
        paired = partner[number] >= 0
        every = table[:, partner[number][paired]]
        group, steps = kind[paired], len(every)
        places = np.bincount(group, minlength=kinds)
        average = np.bincount(group, weights=every.mean(axis=0), minlength=kinds) / np.maximum(places, 1)
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


def host_factors(scenario: Scenario, rank: ResizedRank, work: Float64, log_total: Float64) -> Float64:
    """Factor on each piece of host time of a rank at the new size.

    Args:
        scenario: of the edited capture.
        rank: its operations at the new sizes.
        work: logs of their work, see ``log_work``.
        log_total: logs of the step's work in every capture and at the new size.
    """
    first, kinds = rank.costs[0], len(rank.kinds)
    computes = computing_kinds(scenario, rank)
    inside = _ratios(rank, [one.inside for one in rank.costs],
                     np.where(computes[:, None], work, np.broadcast_to(log_total, (kinds, len(log_total)))),
                     computes.astype(np.float64), OF_HOST)
    # Between operations lie many short times and few pauses, which fall elsewhere in each step: their sum counts.
    between = np.array([[float(one.before.sum(axis=1).mean()) for one in rank.costs]])
    expected = _times(between, np.full_like(between, ONE_EVENT), log_total[None, :], np.zeros(1), OF_HOST)[-1, 0]
    recorded = float(between[0, 0])
    before = np.full(len(first) + 1, expected / recorded if recorded > 0 else 1.0)
    return first.by_slice(scenario.slices, np.where(rank.paired, inside[rank.kind], 1.0), before, 1.0, 1.0)


def computing_kinds(scenario: Scenario, rank: ResizedRank) -> Bool:
    """Return which kinds of operations compute on the host, so that their time follows their own work."""
    found = np.zeros(len(rank.kinds), np.bool_)
    if scenario.built.computes_on_host:
        first = rank.costs[0]
        found[rank.kind[computing_operations(first.graph)[first.op]]] = True
    return found & ~np.array([is_free(kind.name) for kind in rank.kinds], np.bool_)


def _ratios(rank: ResizedRank, tables: list[Float64], log_work: Float64, slope: Float64, doubt: Doubt) -> Float64:
    """Time at the new size over the recorded one of every kind, from tables of the captures, [steps, rows]."""
    kinds = len(rank.kinds)
    times = _times(*_means(tables, rank.partner, rank.kind, kinds, doubt), log_work, slope, doubt)
    recorded = np.bincount(rank.kind, weights=tables[0].mean(axis=0), minlength=kinds)
    expected = times[-1] * np.bincount(rank.kind, minlength=kinds)
    return np.where(recorded > 0, expected / np.maximum(recorded, 1e-9), 1.0)


def _device(scenario: Scenario, rank: ResizedRank, log_work: Float64, factor: Float64,
            calls: list[tuple[OpCall, ...]]) -> None:
    """Put the factor of every kernel of a rank into ``factor``, and the new calls of its pieces into ``calls``."""
    ratio = _ratios(rank, [one.device for one in rank.costs], log_work, np.ones(len(rank.kinds)), OF_KERNELS)
    program, of = scenario.built.program, scenario.work
    low, high = int(program.kernel_ptr[rank.rank]), int(program.kernel_ptr[rank.rank + 1])
    row = np.append(rank.costs[0].of_op, NONE)[operation_of_kernels(scenario, rank.rank)]
    kind = np.where(row >= 0, rank.kind[np.maximum(row, 0)], NONE)
    rows = low + np.arange(high - low)
    factor[rows[kind >= 0]] = ratio[kind[kind >= 0]]
    piece = of.kernel_group[low:high]
    mine = (piece >= 0) & (kind >= 0)
    pairs = np.unique(np.stack([piece[mine], kind[mine]]), axis=1).T if mine.any() else np.zeros((0, 2), np.int64)
    known: dict[tuple[int, int], tuple[OpCall, ...]] = {}
    for one, k in pairs.tolist():
        key = (int(of.call_row[one]), k)
        if key not in known:
            new = resized_calls(calls[one], rank.kinds[k].recorded[0], rank.kinds[k].new,
                                float(np.exp(log_work[k, -1] - log_work[k, 0])))
            known[key] = calls[one] if new is None else new
        calls[one] = known[key]


def _with_kernels(scenario: Scenario, factor: Float64, new: list[tuple[OpCall, ...]], spread: float) -> Scenario:
    """The new calls of pieces, and factors that make up the difference to the measured trend."""
    work, after = scenario.work.regrouped(new)
    spec, models = scenario.known_source(), scenario.devices.source_models
    explained = np.ones(len(work.calls))
    ratios = anchored(prices_of([work.calls[number] for number in after], spec, models),
                      prices_of(list(after.values()), spec, models)).ratio
    explained[list(after)] = np.where(ratios > 0, ratios, 1.0)
    inside = work.kernel_group >= 0
    beyond = factor.copy()
    beyond[inside] /= explained[work.call_row[work.kernel_group[inside]]]
    kernels = scenario.kernels.scaled(beyond).widened(np.where(factor != 1.0, spread, 0.0))
    return replace(scenario, regrouped=work, kernels=replace(kernels, calls=after, change_known=True))
