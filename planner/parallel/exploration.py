"""``explore``: the best plan of every case of a technology exploration, what binds it, what it costs and takes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from kernel_models.device import DeviceSpec
from kernel_models.device_choice import find_device
from planner.parallel.pieces import LayerPieces
from planner.parallel.planning import Plans
from planner.parallel.search import Ranked
from planner.parallel.technology import BINDS, Case

TWICE = 2.0
TELLING = 0.03
"""Least share of the step that twice as much of a figure saves where that figure binds."""
FED = 0.5
"""Share of what twice the compute saves from which on power alone is said to bind."""
NOTHING_FITS = "capacity: nothing fits"

Run = Callable[[Case, "str | None", LayerPieces], Plans]
"""Plans of a case: of all that there are, or of one alone; what has been traced of its device."""


@dataclass(frozen=True, slots=True)
class Explored:
    """A case and its best plan.

    Attributes:
        case: what was asked.
        spec: the device as it is changed.
        plans: what was found, the best first.
        gains: share of the best plan's step that twice as much saves, by what binds ("compute", "power", "memory",
            "network", "capacity": the best plan of all where memory is twice as large).
    """

    case: Case
    spec: DeviceSpec
    plans: Plans
    gains: Mapping[str, float]

    @property
    def best(self) -> Ranked | None:
        """The best plan, if one fits."""
        return self.plans.plans[0] if self.plans.plans else None

    @property
    def binds(self) -> str:
        """Return what the step waits for most: what saves most where there is twice as much of it."""
        if self.best is None:
            return NOTHING_FITS
        most = max(self.gains, key=lambda name: self.gains[name])
        if most == "compute" and self.gains["power"] >= FED * self.gains[most]:
            most = "power"
        return most if self.gains[most] >= TELLING else self.best.estimate.bound

    @property
    def tokens(self) -> float:
        """Tokens of a step; 0 where nothing fits."""
        return 0.0 if self.best is None else float(self.best.plan.global_batch * self.plans.shape.seq)

    @property
    def tokens_per_gpu_second(self) -> float:
        """Return what a GPU does of them in a second."""
        if self.best is None:
            return 0.0
        return self.tokens / self.best.plan.world_size / self.best.estimate.time_us * 1e6

    @property
    def joules_per_token(self) -> float | None:
        """Energy of a token with every board at its limit all the time, J: an upper bound of what boards take."""
        rate = self.tokens_per_gpu_second
        return self.spec.power_w / rate if rate and self.spec.power_w else None

    @property
    def cost_per_million_tokens(self) -> float | None:
        """At the case's price of a GPU and hour."""
        rate = self.tokens_per_gpu_second
        return None if self.case.price is None or not rate else self.case.price / 3600 / rate * 1e6


def explore(cases: Iterable[Case], only: str | None, run: Run) -> list[Explored]:
    """Find the best plan of every case, and what binds it.

    What is traced for one device serves all of its generation. Twice as much of each figure is priced for the best plan
    alone; of memory, where plans are searched for, a search of its own finds what larger memory would allow.

    Args:
        cases: devices and how they are changed.
        only: one plan alone.
        run: makes the plans of a case.

    Raises:
        ForetraceError: a device or a plan is not known, or cannot be.
    """
    traced: list[LayerPieces] = []
    found = []
    for case in cases:
        pieces = _pieces(case, traced)
        plans = run(case, only, pieces)
        found.append(Explored(case, pieces.device, plans, _gains(case, plans, only, run, traced)))
    return found


def _pieces(case: Case, traced: list[LayerPieces]) -> LayerPieces:
    """Pieces of a case's device, with what devices that run the same operations have traced."""
    spec = case.technology.device(find_device(case.device))
    pieces = LayerPieces(spec, like=next((each for each in traced if each.runs_as(spec)), None))
    traced.append(pieces)
    return pieces


def _gains(case: Case, plans: Plans, only: str | None, run: Run, traced: list[LayerPieces]) -> dict[str, float]:
    if not plans.plans:
        return {}
    best = plans.plans[0]
    gains = {}
    for what, figures in BINDS.items():
        more = replace(case, technology=replace(case.technology, **{
            name: TWICE * getattr(case.technology, name) for name in figures}))
        whole = what == "capacity"
        if whole and only is not None:
            continue  # the plan fits, and no other is asked for
        there = run(more, only if whole else str(best.plan), _pieces(more, traced))
        gains[what] = 1.0 - there.plans[0].estimate.time_us / best.estimate.time_us if there.plans else 0.0
    return gains

