"""Error of a recording's own replay: a prediction that rests on it cannot be surer than that."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp

from graph_predictor.prediction.repeat import Cycle
from graph_predictor.prediction.replay import INEXACT, REPRODUCIBLE_SHARE, replayed_steps
from graph_predictor.simulation.build import Built
from graph_predictor.simulation.engine import simulate

MOST_UNEXPLAINED = 0.95
"""Unexplained delays of several streams add up to more than the window; no interval gets wider than a factor of 20."""


@dataclass(frozen=True, slots=True)
class ReplayErrors:
    """Error with which the rules give back the recorded steps that a prediction repeats.

    Attributes:
        error: largest absolute error of the replayed steps, a fraction.
        unexplained: share of the worst rank's window that no rule explains.
        apart: log of the measured step over the unedited predicted one. A steady state inferred from steps that were
            none is a claim about steps that nobody measured: the truth may be either, whatever is edited.
    """

    error: float = 0.0
    unexplained: float = 0.0
    apart: float = 0.0

    def widened(self, low: float, high: float) -> tuple[float, float]:
        """An interval, made wider by what the replay misses, and on one side by as much as the measured step is off."""
        factor = 1.0
        if self.error > INEXACT:
            factor *= 1.0 + self.error
        if self.unexplained > REPRODUCIBLE_SHARE:
            # Were the delay no part of the step, only the rest would be: recorded / (recorded - unexplained).
            factor /= 1.0 - min(self.unexplained, MOST_UNEXPLAINED)
        # What the replay misses may be why the two are apart: it counts once.
        return low / max(factor, exp(-self.apart)), high * max(factor, exp(self.apart))

    def warnings(self) -> list[str]:
        """Sentences for a prediction."""
        found = []
        if self.error > INEXACT:
            found.append(f"The recorded step itself is replayed {self.error:.1%} off (see foretrace replay): the "
                         "interval is wider by that.")
        if self.unexplained > REPRODUCIBLE_SHARE:
            found.append(f"The recorded GPU timeline is not reproducible (see foretrace replay): no rule explains "
                         f"{self.unexplained:.1%} of it. The kernels' times are not to be trusted, and the interval is "
                         "wider by that.")
        return found


def replay_error(built: Built, cycle: Cycle) -> ReplayErrors:
    """Replay the recorded steps of a cycle."""
    program = built.recorded_program
    simulated = simulate(program)
    steps = replayed_steps(built, program, simulated, simulated)
    error = max((abs(step.error) for step in steps if cycle.item[step.begin_item]), default=0.0)
    return ReplayErrors(error, max((report.unexplained_share for report in built.reports), default=0.0))
