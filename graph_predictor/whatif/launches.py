"""How work is launched."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_predictor.prediction.scenario import EditError, Scenario


@dataclass(frozen=True)
class CudaGraphs:
    """The step captured in a CUDA graph and replayed.

    Assumes: the whole step but loading data can be captured, so that its operations take no host time and one graph
    launch is left; waits for the GPU stay; gaps between kernels stay those of the recording (in a graph they are rather
    shorter).
    """

    def describe(self) -> str:
        """One phrase."""
        return "CUDA graphs"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        if not len(scenario.built.program.kernel_item):
            raise EditError("The trace has no GPU work: there is nothing to put into a CUDA graph.")
        return scenario.with_note("The whole step but data loading is taken to be one CUDA graph: it must not depend "
                                  "on values "
                                  "computed on the GPU, nor on changing shapes.", graphed=True)


@dataclass(frozen=True)
class NoDataLoading:
    """Batches are ready on time and loading them takes no host time of the training threads.

    Assumes that enough workers prefetch; copies of batches to the device stay.
    """

    def describe(self) -> str:
        """One phrase."""
        return "no data loading"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        return replace(scenario, loading=False)
