"""Where a step's time comes from: the share of each source in all of its host and device time."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from graph_predictor.prediction.edited_host import GRAPH_LAUNCH_NS, EditedHost
from graph_predictor.prediction.pricing import KernelTimes
from graph_predictor.prediction.scenario import Scenario
from kernel_models.model import Source
from tracer.arrays import Float64

ROUNDING = 1e-6
"""A factor on host time that is this near to one is one, but for rounding."""


class TimeSources(NamedTuple):
    """Shares by the label of a source, the surest first: of all host and device time, and of device time alone."""

    step: dict[str, float]
    device: dict[str, float]


def time_sources(scenario: Scenario, host: EditedHost, times: KernelTimes) -> TimeSources:
    """Return the sources of a step's times, all ranks together, whatever of it the step waits for.

    Time that an edit takes away counts for none. Host time that an edit has changed is anchored at best.

    Args:
        scenario: the step with its edits.
        host: its host.
        times: its kernels.
    """
    shared = scenario.shared
    device = shared.once("device sources", (times, scenario.cycle), lambda: _sums(
        times.source[scenario.cycle.kernel], times.ns[scenario.cycle.kernel]))
    own = shared.once("host sources", (host, scenario.cycle, scenario.slices, int(scenario.host.source)),
                      lambda: _of_host(scenario, host))
    return TimeSources(_shares(device + own), _shares(device))


def _of_host(scenario: Scenario, host: EditedHost) -> Float64:
    """Host time by source, ns."""
    slices, source = scenario.slices, scenario.host.source
    mine = scenario.cycle.working[slices.item]
    ns, was = host.ns[mine], slices.ns[mine]
    changed = np.abs(ns - was) > ROUNDING * was
    sums = _sums(np.where(changed, max(source, Source.ANCHORED), source), ns)
    if scenario.launches.graphed:
        sums[Source.HEURISTIC] += GRAPH_LAUNCH_NS * scenario.host.factor * len(scenario.built.graphs)
    return sums


def _sums(source: np.ndarray, ns: Float64) -> Float64:
    return np.bincount(source, weights=ns, minlength=len(Source)).astype(np.float64)


def _shares(ns: Float64) -> dict[str, float]:
    total = float(ns.sum()) or 1.0
    return {source.label: float(ns[source]) / total for source in Source if ns[source] > 0}
