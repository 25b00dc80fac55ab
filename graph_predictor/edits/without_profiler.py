"""Estimate a recorded step without the profiler, where the capture did not time one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.prediction.unprofiled import profiler_share
from graph_predictor.recorded.facts import active_ns, head_start_ns, runs_ahead
from tracer.arrays import Float64
from tracer.graph import KernelKind


@dataclass(frozen=True)
class TakeOutProfiler:
    """Estimate the step without the profiler from its recording under the profiler alone.

    Each recorded event cost the host a time that is estimated from the recording (``kernel_models.host.overheads``).
    The edit removes this time where the event lies. Where the host was ahead of its device when the recording began,
    the host takes at most the device's time. Captures of foretrace need no estimate: they time the step without the
    profiler. Assumes that the profiler does not slow the device.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "the profiler's cost taken out"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        if not scenario.profiled:
            raise EditError("The step is the one without the profiler already: the capture timed it, or it never ran; "
                            "leave --without-profiler out.")
        scenario = scenario.claim("the host", "--without-profiler")
        if (origin := scenario.origin) is not None:
            recorded = self.apply(origin.scenario)
            assert recorded.host.ns is not None
            factors = origin.host_factors(scenario.slices, recorded.host.ns)
            return replace(scenario.with_note(recorded.notes[-1]), profiled=False, host=replace(
                scenario.host.widened(recorded.host.spread), ns=scenario.host_times() * factors))
        share = profiler_share(scenario)
        left = scenario.host_times() - share.ns
        low, high = share.ends(scenario.host_times())
        ahead = all(runs_ahead(graph) for graph in scenario.built.graphs)
        capped = _no_longer_than_devices(scenario, left) if ahead else left
        if (capped < left).any():
            left, high = capped, float(capped.sum())
            low = min(low, high)
            starts = [head_start_ns(graph) / 1e6 for graph in scenario.built.graphs]
            scenario = scenario.with_note(
                f"When the recording began, devices still had work of the steps before for {min(starts):,.1f} to "
                f"{max(starts):,.1f} ms: without the profiler the hosts run ahead of them, and take at most as long as "
                "their devices compute.")
        width = float(np.log(high / low)) / 2 if low > 0 else 0.0  # a step that took no time has none to divide
        slowest = int(np.argmax(share.step_ns))
        if not share.believed:
            scenario = replace(scenario, warnings=(*scenario.warnings, (
                "Operations that only call others take longer than a profiler makes them, so that the host is slow for "
                "another reason too: how much of its time is the profiler's is not known, and the interval says so.")))
        return replace(scenario.with_note(
            "The step was not timed without the profiler. The profiler is taken to cost "
            f"{share.event_ns[slowest] / 1e3:.2f} µs an event, the median self time of operations that only call "
            f"others: {share.events[slowest]:,.0f} events, {share.step_ns[slowest] / 1e6:,.3f} ms of the host's time a "
            "step."),
            profiled=False, host=replace(scenario.host, ns=left).widened(width))


def _no_longer_than_devices(scenario: Scenario, ns: Float64) -> Float64:
    """Return host times of slices (ns) that add up on each rank to at most the time its device computes and copies."""
    slices, cycle, pointer = scenario.slices, scenario.cycle, scenario.built.program.kernel_ptr
    left = ns.copy()
    for rank, graph in enumerate(scenario.built.graphs):
        kernels = graph.kernels
        own = cycle.kernel[pointer[rank]:pointer[rank + 1]] & (kernels.kind != KernelKind.COLLECTIVE)
        start = kernels.start_ns[own]
        busy = active_ns(start, start + kernels.duration_ns[own], kernels.device[own])
        mine = slices.rank == rank
        host = float(ns[mine & cycle.working[slices.item]].sum())
        left[mine] *= min(busy / host, 1.0) if host else 1.0
    return left
