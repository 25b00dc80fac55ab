"""``explore``: the best plan of every case of a technology exploration, what binds it, what it costs and takes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import isfinite
from typing import Any

from kernel_models.collectives import find_topology, planned_topology
from kernel_models.device import DeviceSpec, find_device
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.planning import PlanRequest, Plans, Technology, check_finite, find_plans
from planner.parallel.search import Ranked
from tracer.cluster.workers import TaskWorkers, ThisProcess
from tracer.parallel_plan import PlanError

AXES: Mapping[str, Mapping[str, float]] = {
    "clock": {"mhz": 1.0, "ghz": 1e3}, "bandwidth": {"gb/s": 1.0, "tb/s": 1e3},
    "memory": {"gb": 1.0, "tb": 1e3, "gib": 1.073741824}, "link": {"gb/s": 1.0, "tb/s": 1e3},
    "power": {"w": 1.0, "kw": 1e3}}
"""Figures that may be changed, and units of their values in those of the device's figure."""
_UNITS = {"clock": "MHz", "bandwidth": "GB/s", "memory": "GB", "link": "GB/s", "power": "W"}
MOST = 100.0
"""Largest factor, and one over the smallest."""
MOST_CASES = 64
"""Cases that are explored at once: each is a search of its own."""
BINDS: Mapping[str, tuple[str, ...]] = {
    "compute": ("clock", "power"), "power": ("power",), "memory": ("bandwidth",), "network": ("link",),
    "capacity": ("memory",)}
"""Resources that a step may wait for, and the figures to raise then: a faster clock needs power too."""
TWICE, TELLING, FED = 2.0, 0.03, 0.5
"""Choices. The factor by which a figure is raised on trial. The least share of the step that this saves where it
binds. The least share of the saving from twice the compute that power alone gives where power binds."""
NOTHING_FITS = "capacity: nothing fits"


@dataclass(frozen=True, slots=True)
class Case:
    """A device, how it is changed, and what it costs.

    Attributes:
        device, topology: as a user names them; ``None``: the device's usual nodes.
        technology: changes.
        price: of a GPU and hour, where it is known.
    """

    device: str
    topology: str | None
    technology: Technology
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Explored:
    """A case and its best plan.

    Attributes:
        case: what was asked.
        spec: the device as it is changed.
        plans: what was found, the best first.
        gains: share of the best plan's step that twice the resource saves, by resource: "compute", "power", "memory",
            "network", "capacity". The last is the best plan of all with twice the memory.
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


def explore(cases: Iterable[Case], request: PlanRequest, workers: TaskWorkers | None = None) -> list[Explored]:
    """Find the best plan of every case, and what binds it.

    What is traced for one device serves all of its generation. Twice as much of each figure is priced for the best plan
    alone. Where plans are searched for, a further search finds what larger memory would allow.

    Args:
        cases: devices and how they are changed.
        request: what is wanted of each; its own device is not looked at.
        workers: of the cases, each of which is one call; by default this process.

    Raises:
        ForetraceError: a device or a plan is not known, or cannot be.
    """
    return list((workers or ThisProcess()).each(partial(_explored, request, []), list(cases), name=lambda case:
                                                case.device))


def _explored(request: PlanRequest, traced: list[LayerCosts], case: Case) -> Explored:
    """Return a case's result. Calls in one process share ``traced``; a call elsewhere begins with its own."""
    plans = _best_of(case, request, traced)
    return Explored(case, traced[-1].device, plans, _gains(case, plans, request, traced))


def _best_of(case: Case, request: PlanRequest, traced: list[LayerCosts]) -> Plans:
    """Find a case's best plan with what devices that run the same operations have traced, and note its own."""
    spec = case.technology.device(find_device(case.device))
    pieces = LayerCosts(spec, like=next((each for each in traced if each.runs_as(spec)), None), profile=request.runs)
    traced.append(pieces)
    return find_plans(replace(request, device=case.device, topology=case.topology, technology=case.technology,
                              pieces=pieces, best=1))


def _gains(case: Case, plans: Plans, request: PlanRequest, traced: list[LayerCosts]) -> dict[str, float]:
    if not plans.plans:
        return {}
    best = plans.plans[0]
    gains = {}
    for what, figures in BINDS.items():
        more = replace(case, technology=replace(case.technology, **{
            name: TWICE * getattr(case.technology, name) for name in figures}))
        whole = what == "capacity"
        if whole and request.only is not None:
            continue  # the plan fits, and no other is asked for
        there = _best_of(more, request if whole else replace(request, only=str(best.plan)), traced)
        gains[what] = 1.0 - there.plans[0].estimate.time_us / best.estimate.time_us if there.plans else 0.0
    return gains


def factors_of(axis: str, text: str | None, spec: DeviceSpec, link_gbps: Callable[[], float]) -> list[float]:
    """Return the factors of an option: "1.5" and "x1.5" are factors, "2100MHz" or "6TB/s" values.

    Args:
        axis: one of ``AXES``.
        text: one or several, separated by commas; ``None`` for none, which is a factor of 1.
        spec: the device that a value is of.
        link_gbps: the bandwidth of a GPU's links to its node that a value is of.

    Raises:
        PlanError: it is neither, or out of range.
    """
    if text is None:
        return [1.0]
    own = {"clock": lambda: spec.boost_clock_mhz, "bandwidth": lambda: spec.memory_bandwidth_gbps,
           "memory": lambda: spec.memory_gb, "link": link_gbps, "power": lambda: spec.power_w}[axis]
    if axis == "power" and not spec.power_w:
        raise PlanError(f"--power: nothing says what power {spec.name} may take; give it as power_w of a FILE.toml "
                        f"(foretrace devices {spec.name} --toml prints one to start from).")
    found = []
    for part in text.split(","):
        match = re.fullmatch(r"[x×]?(\d{1,9}(?:\.\d{1,9})?)\s*([a-z/]*)", part.strip().lower(), re.ASCII)
        unit = match.group(2) if match else "?"
        if match is None or (unit and unit not in AXES[axis]):
            raise PlanError(f"--{axis} {part.strip()[:40]!r} is no factor and no value; write one such as 1.5 or "
                            f"100{_UNITS[axis]}, several separated by commas.")
        factor = float(match.group(1)) * AXES[axis].get(unit, 1.0) / (own() if unit else 1.0)
        if not isfinite(factor) or not 1 / MOST <= factor <= MOST:
            raise PlanError(f"--{axis} {part.strip()} is {factor:g} times what {spec.name} has; give from {1 / MOST:g} "
                            f"to {MOST:g} times as much.")
        found.append(factor)
    return list(dict.fromkeys(found))


def cases_of(devices: str, topologies: str | None, prices: str | None, changes: Mapping[str, str | None],
             gpus: int) -> list[Case]:
    """Return every device with every combination of changes.

    Args:
        devices, topologies, prices: separated by commas; of the latter one for all, or as many as there are devices.
        changes: texts of ``AXES``.
        gpus: of the job, whose usual nodes a link's value is of.

    Raises:
        ForetraceError: a name or a number is none, or there are more than ``MOST_CASES``.
    """
    names = [name.strip() for name in devices.split(",")]
    where = _each(topologies, len(names), "--topology")
    costs = [None if text is None else _price(text) for text in _each(prices, len(names), "--price")]
    found = []
    for name, on, cost in zip(names, where, costs, strict=True):
        spec = find_device(name)

        def link_gbps(on: str | None = on, spec: Any = spec) -> float:
            where = planned_topology(spec, gpus) if on is None else find_topology(on)
            return where.node.peer_gbps

        factors = [factors_of(axis, changes.get(axis), spec, link_gbps) for axis in AXES]
        found += [Case(name, on, Technology(**dict(zip(AXES, values, strict=True))), cost)
                  for values in product(*factors)]
    if len(found) > MOST_CASES:
        raise PlanError(f"{len(found)} devices and changes are more than the {MOST_CASES} that are searched at once; "
                        "name fewer values.")
    return found


def _each(text: str | None, count: int, option: str) -> list[str | None]:
    parts: list[str | None] = [None] if text is None else [part.strip() for part in text.split(",")]
    if len(parts) not in (1, count):
        raise PlanError(f"{option} has {len(parts)} values for {count} {'device' if count == 1 else 'devices'}; give "
                        "one for all, or as many as there are.")
    return parts * count if len(parts) == 1 else parts


def _price(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    check_finite(found, "--price", "the price of one GPU and hour")
    if found < 0:
        raise PlanError(f"--price {text[:40]} is no price of one device and hour; give a number, such as 2.5.")
    return found
