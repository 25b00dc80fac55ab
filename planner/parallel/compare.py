"""Plans beside each other: what separates two, whether the estimate can tell them apart, and which are worth having."""

from __future__ import annotations

from collections.abc import Iterable
from math import hypot

from graph_predictor.figures import signed_percent
from planner.parallel.corrections import Z80
from planner.parallel.estimate import Estimate
from planner.parallel.search import Ranked

PARTS = {"arithmetic": ("products",), "memory traffic": ("others", "optimizer"), "host": ("host", "fixed"),
         "exposed communication": ("layers", "data"), "pipeline bubble": ("pipeline",), "slowest GPU": ("stragglers",)}
"""Parts of an estimate as people name them; together they are the step."""
REPEATED = 0.005
"""Share of a step by which runs of one plan differ: a micro-batch of SimuMax's B200 jobs takes 0.5 to 4% longer in
steps of 32 than in steps of 8."""
LEAST_SHARE = 0.1
"""Least share of all differences between two plans that a part must have to be shown."""


def parts_of(estimate: Estimate) -> dict[str, float]:
    """Return the parts of a step by name, µs."""
    return {name: float(sum(getattr(estimate, each) for each in each_part)) for name, each_part in PARTS.items()}


def differences(first: Estimate, second: Estimate) -> dict[str, float]:
    """Return what the second plan takes longer in each part, µs."""
    one, two = parts_of(first), parts_of(second)
    return {name: two[name] - one[name] for name in PARTS}


def unsure_us(first: Estimate, second: Estimate) -> float:
    """Return the 80% half-width of the difference between two plans' times, µs.

    What both do errs by the same in both and cancels. What one does more of than the other keeps the relative error of
    its kind, independently of the others; waits for other stages and GPUs err as products do.
    """
    by, spreads = differences(first, second), (first.spreads, second.spreads)
    products, others, collectives, host = (max(getattr(each, name) for each in spreads) for name in (
        "products", "others", "collectives", "host"))
    waits = abs(by["pipeline bubble"]) + abs(by["slowest GPU"])
    return Z80 * hypot(products * (abs(by["arithmetic"]) + waits), others * by["memory traffic"],
                       collectives * by["exposed communication"], host * by["host"])


def tied(first: Estimate, second: Estimate) -> bool:
    """Return whether the difference between two plans' times lies inside its own uncertainty, or inside what runs of
    one plan
    differ by."""
    return abs(second.time_us - first.time_us) <= max(unsure_us(first, second), REPEATED * first.time_us)


def separation(first: Estimate, second: Estimate) -> str:
    """Say in a line what separates a plan from a faster one: the parts that differ most, in ms."""
    by = differences(first, second)
    every = sum(abs(us) for us in by.values())
    told = sorted((name for name, us in by.items() if every and abs(us) >= LEAST_SHARE * every),
                  key=lambda name: -abs(by[name]))
    parts = ", ".join(f"{abs(by[name]) / 1e3:,.3g} ms {'more' if by[name] > 0 else 'less'} {name}" for name in told)
    longer = second.time_us / first.time_us - 1 if first.time_us else 0.0
    return f"{signed_percent(longer)}: {parts or 'nothing'}"


def front(plans: Iterable[Ranked]) -> list[Ranked]:
    """Return the plans that no other is at least as good as in time of a sequence, memory of a device and GPUs; the
    quickest first. What a step costs is GPUs times time, so that the cheapest are among them."""
    ordered = sorted(plans, key=_figures)
    kept: list[Ranked] = []
    for each in ordered:
        if not any(all(a <= b for a, b in zip(_figures(other), _figures(each), strict=True)) for other in kept):
            kept.append(each)
    return kept


def _figures(each: Ranked) -> tuple[float, float, int]:
    return each.estimate.time_us / each.plan.global_batch, each.memory.total, each.plan.world_size
