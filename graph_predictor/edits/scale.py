"""Faster or slower parts of the machine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from graph_predictor.prediction.scenario import EditError, Scenario
from graph_predictor.simulation.build import kernel_factors
from graph_predictor.simulation.program import MOST_FACTOR


def _checked(factor: float, what: str) -> float:
    if not 1 / MOST_FACTOR <= factor <= MOST_FACTOR:
        raise EditError(f"{what} cannot be scaled by {factor:g}: give a positive factor, at most {MOST_FACTOR:g}.")
    return factor


@dataclass(frozen=True)
class ScaleClock:
    """Scale the GPU's clock by a factor. Assumes peak rates follow the clock; memory bandwidth and launch costs do
    not."""

    factor: float

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"GPU clock × {self.factor:g}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario.known_source()
        clock = scenario.devices.clock * _checked(self.factor, "The clock")
        return replace(scenario, devices=replace(scenario.devices, clock=clock))


@dataclass(frozen=True)
class ScaleBandwidth:
    """Scale the GPU's memory bandwidth by a factor. Assumes that caches, and all else, stay as they are."""

    factor: float

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"memory bandwidth × {self.factor:g}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        scenario.known_source()
        bandwidth = scenario.devices.bandwidth * _checked(self.factor, "The memory bandwidth")
        return replace(scenario, devices=replace(scenario.devices, bandwidth=bandwidth))


@dataclass(frozen=True)
class ScaleKernels:
    """Scale every kernel's duration by a factor, collectives too if asked. A pure what-if: it assumes nothing."""

    factor: float
    collectives: bool = False

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"kernels × {self.factor:g}" + (", collectives too" if self.collectives else "")

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        factors = kernel_factors(scenario.built.graphs, self.factor, self.collectives)
        if scenario.built.computes_on_host and not (self.collectives and len(scenario.built.program.kernel_item)):
            raise EditError("The trace has no GPU work, so that there is no kernel to scale; --host scales the host's "
                            "time.")
        return replace(scenario, kernels=scenario.kernels.scaled(factors))


@dataclass(frozen=True)
class ScaleHost:
    """Scale all host time (Python, operators, calls, hand-overs) by a factor, such as the ratio of two CPUs'
    single-thread times. Assumes that every part scales alike; waiting is simulated again."""

    factor: float

    def describe(self) -> str:
        """Return one phrase for reports."""
        return f"host time × {self.factor:g}"

    def apply(self, scenario: Scenario) -> Scenario:
        """Return the scenario with this edit applied (``Edit.apply``)."""
        factor = scenario.host.factor * _checked(self.factor, "Host time")
        return replace(scenario, host=replace(scenario.host, factor=factor))
