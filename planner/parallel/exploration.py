"""``explore``: the best plan for each of several devices or changed devices, its bound, its cost and its energy."""

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
"""Figures that may be changed, and their units as multiples of the device figure's unit."""
_UNITS = {"clock": "MHz", "bandwidth": "GB/s", "memory": "GB", "link": "GB/s", "power": "W"}
MOST = 100.0
"""Largest factor; the least is its inverse."""
MOST_CASES = 64
"""Most cases of one exploration: each is a search of its own."""
BINDS: Mapping[str, tuple[str, ...]] = {
    "compute": ("clock", "power"), "power": ("power",), "memory": ("bandwidth",), "network": ("link",),
    "capacity": ("memory",)}
"""Resources that may limit a step, and the figures that are raised to try it: a faster clock needs power too."""
TWICE, TELLING, FED = 2.0, 0.03, 0.5
"""Choices. Factor by which a figure is raised to try it. Least saving of a bound, as a share of the step. Least share
of compute's saving that power alone must give for power to be the bound."""
NOTHING_FITS = "capacity: nothing fits"


@dataclass(frozen=True, slots=True)
class Case:
    """A device with changes and a price.

    Attributes:
        device, topology: names; the topology ``None`` is the device's usual nodes.
        technology: factors on the device's figures.
        price: price of one GPU hour, if known.
    """

    device: str
    topology: str | None
    technology: Technology
    price: float | None = None


@dataclass(frozen=True, slots=True)
class Explored:
    """A case and its best plan.

    Attributes:
        case: the case.
        spec: the changed device.
        plans: the plans found, best first.
        gains: share of the best plan's step saved by twice of each resource: "compute", "power", "memory", "network",
            "capacity". For "capacity", the best plan with twice the memory counts.
    """

    case: Case
    spec: DeviceSpec
    plans: Plans
    gains: Mapping[str, float]

    @property
    def best(self) -> Ranked | None:
        """The best plan; ``None`` if none fits."""
        return self.plans.plans[0] if self.plans.plans else None

    @property
    def binds(self) -> str:
        """The bound of the step: the resource that saves most if there is twice of it."""
        if self.best is None:
            return NOTHING_FITS
        most = max(self.gains, key=lambda name: self.gains[name])
        if most == "compute" and self.gains["power"] >= FED * self.gains[most]:
            most = "power"
        return most if self.gains[most] >= TELLING else self.best.estimate.bound

    @property
    def tokens(self) -> float:
        """Tokens of a step; 0 if no plan fits."""
        return 0.0 if self.best is None else float(self.best.plan.global_batch * self.plans.shape.seq)

    @property
    def tokens_per_gpu_second(self) -> float:
        """Tokens that one GPU processes in a second."""
        if self.best is None:
            return 0.0
        return self.tokens / self.best.plan.world_size / self.best.estimate.time_us * 1e6

    @property
    def joules_per_token(self) -> float | None:
        """Energy of a token if all boards run at their power limit, J: an upper bound."""
        rate = self.tokens_per_gpu_second
        return self.spec.power_w / rate if rate and self.spec.power_w else None

    @property
    def cost_per_million_tokens(self) -> float | None:
        """Cost of a million tokens at the case's price of a GPU hour; ``None`` without a price."""
        rate = self.tokens_per_gpu_second
        return None if self.case.price is None or not rate else self.case.price / 3600 / rate * 1e6


def explore(cases: Iterable[Case], request: PlanRequest, workers: TaskWorkers | None = None) -> list[Explored]:
    """Find the best plan of every case, and its bound.

    Devices of one generation share traces. For each resource, the best plan alone is priced again with twice as much of
    it. For capacity, plans are searched again with twice the memory, unless one plan was requested.

    Args:
        cases: devices and their changes.
        request: the request for each; its own device is ignored.
        workers: processes that share the cases, one a call; by default this one.

    Raises:
        ForetraceError: a device or a plan is unknown or not possible.
    """
    return list((workers or ThisProcess()).each(partial(_explored, request, []), list(cases), name=lambda case:
                                                case.device))


def _explored(request: PlanRequest, traced: list[LayerCosts], case: Case) -> Explored:
    """Return a case's result. Calls in one process share ``traced``; a call elsewhere begins with its own."""
    plans = _best_of(case, request, traced)
    return Explored(case, traced[-1].device, plans, _gains(case, plans, request, traced))


def _best_of(case: Case, request: PlanRequest, traced: list[LayerCosts]) -> Plans:
    """Find a case's best plan, with traces of devices that run the same operations, and add its costs to ``traced``."""
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
            continue  # only this plan was requested, and it fits
        there = _best_of(more, request if whole else replace(request, only=str(best.plan)), traced)
        gains[what] = 1.0 - there.plans[0].estimate.time_us / best.estimate.time_us if there.plans else 0.0
    return gains


def factors_of(axis: str, text: str | None, spec: DeviceSpec, link_gbps: Callable[[], float]) -> list[float]:
    """Return the factors of an option: "1.5" and "x1.5" are factors, "2100MHz" or "6TB/s" are values.

    Args:
        axis: one of ``AXES``.
        text: one or several, separated by commas; ``None`` for the factor 1.
        spec: the device to whose figure a value is compared.
        link_gbps: returns the bandwidth of a GPU's links in its node, to which a link's value is compared.

    Raises:
        PlanError: an item is neither factor nor value, or out of range.
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
        devices, topologies, prices: separated by commas; of the last two, one for all devices or one for each.
        changes: texts of the options, by ``AXES``.
        gpus: number of GPUs of the job, for a link's value on its usual nodes.

    Raises:
        ForetraceError: a name or a number is invalid, or there are more than ``MOST_CASES`` cases.
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
