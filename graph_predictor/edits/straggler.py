"""One rank slower than the others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.simulation.program import MOST_FACTOR


@dataclass(frozen=True)
class Straggler:
    """Slow one rank down by a share: its host and all its kernels except collectives. Assumes that it is slow all the
    time, and that transfers are not slower.

    Attributes:
        rank: its number.
        slower: such as 0.1 for 10%.
    """

    rank: int
    slower: float

    def __post_init__(self) -> None:
        """Raise ``EditError`` unless ``slower`` is above -1 (negative: a faster rank) and at most ``MOST_FACTOR``."""
        if not -1 < self.slower <= MOST_FACTOR:
            raise EditError(f"A rank cannot be slower by {100 * self.slower:g}%; give more than -100%, and less than "
                            f"{100 * MOST_FACTOR:g}%.")

    @classmethod
    def parse(cls, text: str) -> Straggler:
        """Parse "3:10%" (rank 3, 10% slower). Raises ``EditError`` for anything else."""
        rank, _, share = text.strip().removesuffix("%").partition(":")
        try:
            return cls(int(rank), float(share) / 100)
        except ValueError:
            raise EditError(f"{text!r} names no straggler; write the rank and how much slower it is, such as "
                            "3:10%.") from None

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"rank {self.rank} slower by {100 * self.slower:g}%"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        graphs = scenario.built.graphs
        found = [row for row, graph in enumerate(graphs) if max(graph.meta.rank, 0) == self.rank]
        if not found:
            have = ", ".join(str(graph.meta.rank) for graph in graphs[:8])
            raise EditError(f"There is no rank {self.rank} in this job (it has {have}); name one of those.")
        pointer = scenario.built.program.kernel_ptr
        kernels = np.ones(len(scenario.built.program.kernel_item))
        mine = np.arange(int(pointer[found[0]]), int(pointer[found[0] + 1]))
        kernels[mine[scenario.work.kernel_group[mine] >= 0]] += self.slower
        weight = np.ones(len(scenario.slices))
        weight[scenario.slices.rank == found[0]] += self.slower
        return replace(scenario, kernels=scenario.kernels.scaled(kernels), host=scenario.host.scaled(weight))
