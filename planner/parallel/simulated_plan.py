"""``simulate_plan``: a plan's step on the simulator that replays recordings, beside the estimate that searches use."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.program import Simulated
from planner.parallel.estimate import Rates, slowest_of
from planner.parallel.loads import Loads
from planner.parallel.plan_program import PlanProgram, plan_program
from planner.parallel.task_rows import PlanStream


@dataclass(frozen=True, slots=True)
class SimulatedPlan:
    """A plan's step, simulated.

    Attributes:
        made: its program.
        times: of all its calls and kernels.
        time_us: of the step, with what its estimate adds for the slowest of all GPUs and for likeness.
    """

    made: PlanProgram
    times: Simulated
    time_us: float

    @property
    def stage_us(self) -> list[float]:
        """When each stage has ended, µs."""
        return [float(self.times.kernel_end[low:high].max()) / 1e3
                for low, high in pairwise(self.made.program.kernel_ptr.tolist())]

    def compute_busy(self) -> list[float]:
        """Return the share of the step in which each stage's GPU works or waits for collectives of its layers."""
        end, found = float(self.times.kernel_end.max()), []
        for low, high in pairwise(self.made.program.kernel_ptr.tolist()):
            rows = low + np.flatnonzero(self.made.stream[low:high] == PlanStream.COMPUTE)
            found.append(float((self.times.kernel_end[rows] - self.times.kernel_start[rows]).sum()) / end)
        return found


def simulate_plan(loads: Loads, rates: Rates) -> SimulatedPlan:
    """Simulate a plan's step.

    Raises:
        TooManyKernels: it is too long for that.
    """
    made = plan_program(loads, rates)
    times = simulate(made.program)
    ended = float(times.kernel_end.max()) / 1e3
    total = ended * (1 + rates.jitter * slowest_of(loads.plan.world_size)) + rates.step_us
    if rates.likeness is not None:
        total *= float(np.exp(rates.likeness.correction(loads)))
    return SimulatedPlan(made, times, total)
