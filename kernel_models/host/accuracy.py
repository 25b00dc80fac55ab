"""How well a host's programs tell each other: each left out of a fit to the others in turn."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from kernel_models.host.fitting import fit_host
from kernel_models.host.model import HostModel
from kernel_models.host.step_events import HostStep


@dataclass(frozen=True, slots=True)
class ToldHost:
    """One program's host time, ns a step, as measured and as a model tells it.

    Attributes:
        known: share of the measured time in events that the model knows as they are.
        within: whether it lies in the model's 80% interval.
    """

    name: str
    measured_ns: float
    told_ns: float
    known: float
    within: bool

    @property
    def error(self) -> float:
        """Relative error."""
        return self.told_ns / self.measured_ns - 1


def told(name: str, step: HostStep, model: HostModel) -> ToldHost:
    """Return what a model says of a measured step."""
    before, inside = model.estimate(step)
    total = float(before.sum() + inside.sum())
    spent = np.empty(len(before) + len(inside))
    spent[0::2], spent[1::2] = step.before_ns, step.inside_ns
    return ToldHost(name, step.host_ns, total, float(spent @ model.knows(step)) / step.host_ns,
                    abs(np.log(total / step.host_ns)) <= model.suited(step.calls is not None).spread)


def left_out(steps: Mapping[str, HostStep]) -> list[ToldHost]:
    """Return each program as a fit to all others tells it. Raises ``ForetraceError`` as ``fit_host``."""
    return [told(name, step, fit_host([other for key, other in steps.items() if key != name]))
            for name, step in steps.items()]
