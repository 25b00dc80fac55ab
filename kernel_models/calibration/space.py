"""The sizes that a calibration may measure: for each family of kernels, the range that its micro-benchmarks declare.

Sizes are drawn log-uniformly, most often as the multiples that models use. Sizes that would take too much time or
memory on the device are not drawn; a CPU has smaller bounds and fewer modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from kernel_models.datasets.campaign import calls_of_benchmark
from kernel_models.device import DeviceSpec
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.op_call import Family, OpCall
from tracer.campaign.families import FAMILIES
from tracer.campaign.families.family import SearchSpace, Span
from tracer.campaign.items import Item, Split, kernel_item
from tracer.campaign.plan import CampaignError

_TRIES = 60
"""Most draws to find settings that fit the limits."""
_RUNS = 32
"""Runs of one micro-benchmark if each run is long: warm-up, both variants, profile."""


class Space(NamedTuple):
    """Range of settings of a micro-benchmark, and the family of its calls."""

    family: Family
    benchmark: str
    drawn: SearchSpace


@dataclass(frozen=True)
class Limits:
    """The limits of one measurement.

    Attributes:
        run_us: Longest run, by the formulas, µs.
        bytes: Most memory that its tensors may take together.
        fixed_s: Time of any measurement in addition to its runs, seconds.
        budget_s: Longest time for repeating the runs of one variant, seconds.
        fill_gbps: Rate at which random data are made, 10⁹ bytes/s.
    """

    run_us: float
    bytes: float
    fixed_s: float
    budget_s: float
    fill_gbps: float


class Candidate(NamedTuple):
    """A possible measurement: the item with its expected seconds, its call, and the bytes of its tensors together."""

    item: Item
    call: OpCall
    bytes: float

    @property
    def split(self) -> Split:
        """Return the split (fit or held out) of the candidate's shape group."""
        return self.item.split


def limits_for(spec: DeviceSpec, free_bytes: float) -> Limits:
    """Return the limits on a device with ``free_bytes`` of free memory."""
    if spec.vendor == "host":
        return Limits(run_us=6e3, bytes=min(0.1 * free_bytes, 192e6), fixed_s=0.02, budget_s=0.02, fill_gbps=0.3)
    return Limits(run_us=2e4, bytes=min(0.3 * free_bytes, 16e9), fixed_s=0.06, budget_s=0.1, fill_gbps=50.0)


def families_of(device: str) -> list[str]:
    """Return the families that can be calibrated on "cuda" or "cpu"."""
    return list(dict.fromkeys(space.family.value for space in spaces(device)))


@cache
def spaces(device: str) -> Sequence[Space]:
    """Return all spaces of "cuda" or "cpu"."""
    rng = np.random.default_rng(0)
    found = []
    for benchmark in FAMILIES.values():
        for drawn in benchmark.spaces:
            if drawn.device == device:
                calls: tuple[OpCall, ...] = ()
                while not calls:
                    calls = _drawn(benchmark.name, drawn, rng)[1]
                found.append(Space(calls[0].family, benchmark.name, drawn))
    return found


def draw(space: Space, spec: DeviceSpec, limits: Limits, rng: np.random.Generator) -> Candidate | None:
    """Return a candidate drawn within the limits; ``None`` if none was found."""
    for _ in range(_TRIES):
        settings, calls = _drawn(space.benchmark, space.drawn, rng)
        if calls:
            found = candidate(space.benchmark, settings, calls[0], spec, limits)
            if found is not None:
                return found
    return None


def _drawn(benchmark: str, space: SearchSpace, rng: np.random.Generator) -> tuple[dict[str, Any], tuple[OpCall, ...]]:
    """Return drawn settings and their calls; no call where the settings do not fit together."""
    values: dict[str, Any] = {name: _size(span, rng) for name, span in space.sizes.items()}
    values |= {name: options[rng.integers(len(options))] for name, options in space.choices.items()}
    try:
        settings = FAMILIES[benchmark].checked(FAMILIES[benchmark].fit(values))
    except CampaignError:
        return {}, ()
    return settings, calls_of_benchmark(benchmark, settings)


def candidate(benchmark: str, settings: dict[str, Any], call: OpCall, spec: DeviceSpec, limits: Limits,
              ) -> Candidate | None:
    """Return the candidate with these settings; ``None`` if they exceed the limits."""
    run_us = float(RooflineModel(call.family, spec).predict([call]).time_us[0])
    stored = 3.0 * call.bytes_moved if call.family is Family.RANDOM else 1.5 * call.bytes_moved
    if call.family in (Family.EMBEDDING, Family.INDEX):
        stored += 4.0 * settings["rows"] * settings["width"]
    if run_us > limits.run_us or stored > limits.bytes:
        return None
    runs_s = min(_RUNS * run_us / 1e6, 2 * limits.budget_s + 12 * run_us / 1e6)
    seconds = limits.fixed_s + runs_s + stored / (limits.fill_gbps * 1e9)
    return Candidate(kernel_item(benchmark, settings, seconds=seconds), call, stored)


def _size(span: Span | tuple[int, ...], rng: np.random.Generator) -> int:
    if not isinstance(span, Span):
        return int(span[rng.integers(len(span))])
    unit = span.units[rng.integers(len(span.units))]
    value = span.low * (span.high / span.low) ** rng.random()
    return int(np.clip(round(value / unit) * unit, -(-span.low // unit) * unit, span.high))
