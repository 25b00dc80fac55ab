"""Edits that overlap work with the step: loading, collectives, waits."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.edits.launches import check_loading_is_known, loading_ns, waits_for_batches
from graph_predictor.prediction.edited_repeats import collective_rows, input_copies
from graph_predictor.prediction.scenario import EditError, Loading, Scenario


@dataclass(frozen=True)
class OverlapLoading:
    """Load batches in the background while the step before runs.

    Assumes one worker with a core of its own that loads a batch in the time that the training thread took. More workers
    load several batches at once, so loading limits the step less. Batches are copied to the device from pinned memory
    on a stream of their own. Loading and copies then take no time of the step, but the step is at least as long as
    each.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "loading overlapped"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario = scenario.claim("loading", "--overlap-loading")
        check_loading_is_known(scenario)
        if not loading_ns(scenario):
            if waits_for_batches(scenario):
                raise EditError("The step's batches are loaded in the background already; --no-data-loading tells what "
                                "faster loading would save.")
            if not (input_copies(scenario) & scenario.cycle.kernel).any():
                raise EditError("The step loads nothing: there is no loading to overlap.")
        return replace(scenario, batches=replace(scenario.batches, loading=Loading.BACKGROUND))


@dataclass(frozen=True)
class HideCollectives:
    """Overlap communication perfectly: collectives overlap all other work, and nothing waits for them.

    This is a bound, not a plan. The step is at least as long as all its collectives in a row. Ranks of one collective
    still wait for one another.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "collectives overlapped"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        if not (collective_rows(scenario) & scenario.cycle.kernel).any():
            raise EditError("The step has no collectives on the device: there is nothing to overlap.")
        return replace(scenario, launches=replace(scenario.launches, hidden_collectives=True))


@dataclass(frozen=True)
class NoWaits:
    """Remove the host's waits for the device within the step: no ``.item()``, no synchronisation.

    Assumes that the host needs none of the values it read back. The calls themselves and the launch queue's limit stay.
    """

    def describe(self) -> str:
        """Return one phrase for reports."""
        return "no waits for the device"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        program = scenario.built.program
        waits = np.diff(program.wait_ptr) > 0
        if not (waits & scenario.cycle.item).any():
            raise EditError("The host of the step waits for no device work: there is no wait to remove.")
        return replace(scenario, launches=replace(scenario.launches, waits=False))
