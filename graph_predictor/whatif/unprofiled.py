"""A step nobody watches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_predictor.prediction.profiler_cost import profiler_cost
from graph_predictor.prediction.scenario import EditError, Scenario


@dataclass(frozen=True)
class Unprofiled:
    """The step without the profiler, which every recorded time is under.

    The capture timed steps with nothing watching. The difference to the profiled ones is spread over the recorded
    operations and calls; on a CPU a factor on what is left then gives exactly the time of the unwatched steps. Assumes
    that an event costs the same wherever it is, and that kernels are not slowed by being recorded.
    """

    def describe(self) -> str:
        """One phrase."""
        return "without the profiler"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        if scenario.profiler is None and profiler_cost(scenario) is None:
            raise EditError("The trace does not say what a step takes without the profiler; foretrace capture records "
                            "that too.")
        return replace(scenario, unprofiled=True)
