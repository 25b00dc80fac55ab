"""Edits of launches, and of the time that the training thread spends on batches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_predictor.prediction.scenario import EditError, Loading, Scenario
from graph_predictor.simulation.program import NEVER


@dataclass(frozen=True)
class CudaGraphs:
    """Capture the step in a CUDA graph and replay it.

    Assumes that the whole step except data loading can be captured: its operations take no host time, and one graph
    launch remains. Waits for the GPU stay. Gaps between kernels stay those of the recording (in a graph they tend to be
    shorter).
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "CUDA graphs"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        _with_kernels(scenario, "there is nothing to put into a CUDA graph")
        return scenario.with_note("The whole step but data loading is taken to be one CUDA graph: it must not depend "
                                  "on values computed on the GPU, nor on changing shapes.",
                                  launches=replace(scenario.launches, graphed=True))


@dataclass(frozen=True)
class FreeLaunches:
    """Make launch calls take no host time, and kernels start as soon as they are launched.

    A bound: what is left of the host is Python and the framework's own work.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "free launches"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        _with_kernels(scenario, "there is no launch to make free")
        return replace(scenario, launches=replace(scenario.launches, cost=False))


@dataclass(frozen=True)
class NoDataLoading:
    """Have batches ready on time: loading them takes no host time of the training threads.

    Assumes that enough workers prefetch; copies of batches to the device stay.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "no data loading"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario = scenario.claim("loading", "--no-data-loading")
        check_loading_is_known(scenario)
        if not (loading_ns(scenario) or waits_for_batches(scenario)):
            raise EditError("The step loads nothing: there is no loading to leave out.")
        return replace(scenario, batches=replace(scenario.batches, loading=Loading.NONE))


def check_loading_is_known(scenario: Scenario) -> None:
    """Raise ``EditError`` if the recorded step's own thread loads its batches and the step was traced again, since that
    trace does not separate this time from other host time."""
    if scenario.origin is None or loading_ns(scenario) or not loading_ns(scenario.origin.scenario):
        return
    raise EditError("The recorded step loads its batches in the training thread, which a step that is traced again, at "
                    "other sizes or on other ranks, does not tell apart from its other host time; leave the change of "
                    "loading out, or the other one.")


def waits_for_batches(scenario: Scenario) -> bool:
    """Return whether another process or thread makes the step's batches: loader workers, or work that the host waited
    for."""
    waited = scenario.built.recorded_program.item_external[scenario.cycle.item] > NEVER
    return bool(waited.any()) or scenario.batches.loader is not None


def loading_ns(scenario: Scenario) -> float:
    """Return the host time that the step's own threads spend on loading, as recorded, ns."""
    slices = scenario.slices
    return float(slices.ns[slices.data & scenario.cycle.working[slices.item]].sum())


def _with_kernels(scenario: Scenario, why: str) -> None:
    if scenario.built.computes_on_host:
        raise EditError(f"The trace has no GPU work: {why}.")
