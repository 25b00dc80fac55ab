"""``RooflineModel``: the time of a family's work at a device's published rates and the efficiencies of its kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernel_models.device import DeviceSpec, device
from kernel_models.heuristics.corrections import Corrections, accumulates_at_half, shipped_corrections
from kernel_models.heuristics.efficiency import Efficiencies, default_efficiencies_of, together
from kernel_models.heuristics.work import CallTable, computed_as, memory_us, most_floors, peak_tflops, work
from kernel_models.op_call import PRODUCTS, Arrays, Family, OpCall, Source, Times
from kernel_models.spreads import (
    ASSUMED_SIZES,
    END,
    FIXED_COST,
    HOST_ROWS,
    LACKING_TYPE,
    OTHER_DEVICE,
    PLACEHOLDER_DEVICE,
    PUBLISHED_CPU,
    UNMEASURED_CACHE,
)
from tracer.arrays import Float64

UNSIZED_FLOORS = (1.0, 3.0, 60.0)
"""Low, expected and high time of a call without recorded sizes, in kernel floors. These are the 10%, 50% and 90%
quantiles of kernels of two training traces, V100 ResNet-50 and A100 recommendation (2, 6 and 120 µs)."""

REACHED, BOOSTED = 0.95, 1.1
"""Highest share of the published rate of products after a correction; the second is for GeForce boards, which run above
the clock of their data sheet. Set: the best 16-bit products of the tables reach 0.93 of it (fp32 ones 0.99, more where
a board's power limits the rate). Corrections learned for one layout or type also apply to unmeasured ones."""
CACHED = 2.5
"""Highest multiple of the bandwidth of long copies after a correction: a cache keeps part of the previous kernel's
output, and casts overlap their neighbours. Set: nearer to 1 it limits casts and norms of steps. The fit then takes
their time from convolutions, and a GPU left out is predicted within 15, not 11% (one fold, every fourth model)."""


class Parts(NamedTuple):
    """The parts of calls' times without corrections, µs [n]: arithmetic, traffic and fixed cost."""

    compute_us: Float64
    memory_us: Float64
    fixed_us: Float64


class Least(NamedTuple):
    """The shortest corrected times of the arithmetic and the traffic of calls, µs [n]."""

    compute_us: Float64
    memory_us: Float64


class RooflineModel:
    """Model of one family on one device: ``HEURISTIC`` with efficiencies fitted to the device, else ``DATASHEET``.

    Args:
        family: The family.
        device: The device's figures.
        efficiencies: Default: those of uncalibrated devices.
        corrections: Factors on arithmetic and traffic learned from steps; default: none.
    """

    def __init__(self, family: Family, device: DeviceSpec, efficiencies: Efficiencies | None = None,
                 corrections: Corrections | None = None) -> None:
        self.family = family
        self.device = device
        self.efficiencies = efficiencies or default_efficiencies_of(device)
        self.corrections = corrections

    @property
    def source(self) -> Source:
        """Return ``HEURISTIC`` if the efficiencies were fitted to the device, else ``DATASHEET``."""
        own = self.corrections is not None and self.device.name in self.corrections.devices
        return Source.HEURISTIC if self.efficiencies.fitted or own else Source.DATASHEET

    def covers(self, calls: Sequence[OpCall]) -> npt.NDArray[np.bool_]:
        """Return true for every call of the family: the formulas hold for any size, the interval shows their error."""
        return np.fromiter((call.family == self.family for call in calls), np.bool_, len(calls))

    def predict(self, calls: Sequence[OpCall]) -> Times:
        """Return times, µs: kernels' fixed costs, plus arithmetic and traffic in overlap (``efficiency.together``)."""
        table = CallTable.of(self.family, calls)
        compute, memory, fixed, low, high = self._reached(table)
        parts = self._parts(table, compute, memory, fixed)
        compute_us, memory_us, fixed_us = parts
        if self.corrections is not None:
            shortest = self._least(table, parts)
            more_compute, more_memory, more_fixed = self.corrections.factors(table, self.device)
            compute_us = np.maximum(compute_us * more_compute, shortest.compute_us)
            memory_us = np.maximum(memory_us * more_memory, shortest.memory_us)
            fixed_us = fixed_us * more_fixed
        time = fixed_us + together(compute_us, memory_us, self.device)
        # The uncertain part of a short call is its fixed cost, of a long call the rates.
        short = FIXED_COST * fixed_us / time
        low_us, high_us = time * np.exp(-np.hypot(low, short)), time * np.exp(np.hypot(high, short))
        unsized = table.flagged("unsized") > 0
        if unsized.any():
            least, expected, most = (self.device.kernel_floor_us * floors for floors in UNSIZED_FLOORS)
            time, low_us, high_us = (np.where(unsized, value, column) for value, column in
                                     ((expected, time), (least, low_us), (most, high_us)))
        width = self._common_width()
        if width is None:
            return Times(time, low_us, high_us)
        low_us, high_us = np.minimum(low_us, time * np.exp(-width)), np.maximum(high_us, time * np.exp(width))
        return Times(time, low_us, high_us, 2.0 * width / np.log(high_us / low_us))

    def _reached(self, table: CallTable) -> tuple[Float64, Float64, Float64, Float64, Float64]:
        """Return efficiencies of every call and the logs of its interval's ends, [n] each, computed once per device."""
        device = self.device
        of = id(self.efficiencies), device.vendor, device.placeholder, tuple(device.matrix_tflops)

        def make() -> tuple[Efficiencies, tuple[Float64, Float64, Float64, Float64, Float64]]:
            return self.efficiencies, self._efficiencies_of(table)  # stored with the value, so that its id stays unique

        return table.once(("reached", of), make)[1]

    def _efficiencies_of(self, table: CallTable) -> tuple[Float64, Float64, Float64, Float64, Float64]:
        compute, memory, fixed, low, high = self.efficiencies.columns(table, self._efficiency_of)
        if self.family in PRODUCTS and not self.efficiencies.fitted:
            lacking = table.by_dtype(lambda dtype: LACKING_TYPE * self._lacks(dtype))
            low, high = -np.hypot(low, lacking), np.hypot(high, lacking)
        if self.family is Family.EMBEDDING:
            far = HOST_ROWS * table.flagged("host_rows")
            low, high = -np.hypot(low, far), np.hypot(high, far)
        wider = self._not_said(table)
        low, high = -np.hypot(low, wider), np.hypot(high, wider)
        if self.device.placeholder:
            low, high = low - PLACEHOLDER_DEVICE, high + PLACEHOLDER_DEVICE
        elif self.device.vendor == "host" and not self.efficiencies.fitted:
            low, high = low - PUBLISHED_CPU, high + PUBLISHED_CPU
        return compute, memory, fixed, low, high

    def _not_said(self, table: CallTable) -> Float64:
        """Return the added log half width for sizes that calls assumed, and for caches without measurements [n]."""
        found = ASSUMED_SIZES * table.flagged("assumed")
        if self.family is Family.ATTENTION and not self.efficiencies.fitted:
            older = 1.0 - np.minimum(table.dim("q_len") / table.dim("kv_len"), 1.0)
            found = np.hypot(found, UNMEASURED_CACHE * older)
        return found

    def _common_width(self) -> float | None:
        """Return the log half width of the 80% interval of a step's whole time in this family; ``None`` if unknown."""
        if self.corrections is None or self.family.value not in self.corrections.widths:
            return None
        elsewhere = 1.0 if self.device.name in self.corrections.devices else OTHER_DEVICE
        return END * elsewhere * self.corrections.widths[self.family.value]

    def parts(self, calls: Sequence[OpCall]) -> tuple[Parts, Least]:
        """Return the parts of every call's time, and the least values to which corrections may reduce them."""
        table = CallTable.of(self.family, calls)
        compute, memory, fixed, _, _ = self._reached(table)
        parts = self._parts(table, compute, memory, fixed)
        return parts, self._least(table, parts)

    def _parts(self, table: CallTable, compute: Float64, memory: Float64, fixed: Float64) -> Parts:
        if self.device.vendor == "host" and not (self.efficiencies.fitted or self.device.placeholder):
            # One thread's efficiency may exceed 1; all threads together cannot exceed the memory's channels.
            memory = np.minimum(memory, 1.0)
        done = work(table, self.device)
        if not self.efficiencies.fitted:
            fixed = np.minimum(fixed, table.by_kind(lambda kind: most_floors(self.device, self.family, ":" in kind)))
        return Parts(done.compute_us / compute, done.memory_us / memory,
                     fixed * self.device.kernel_floor_us * done.kernels)

    def _least(self, table: CallTable, parts: Parts) -> Least:
        peak = table.by_dtype(lambda dtype: peak_tflops(self.device, dtype, matrix=True))
        reached = BOOSTED if accumulates_at_half(self.device) else REACHED
        return Least(np.minimum(parts.compute_us, table.flops / peak / 1e6 / reached),
                     np.minimum(parts.memory_us, memory_us(table.bytes_moved, self.device) / CACHED))

    def _lacks(self, dtype: str) -> bool:
        """Return whether the device, or the measurements, lack products of a type, so that another type's efficiency is
        used."""
        return dtype == "fp4" or computed_as(self.device, dtype) != dtype

    def _efficiency_of(self, dtype: str) -> str:
        """Return the type whose efficiency is used: no measurement has fp4, which is assumed to be like fp8."""
        if self.family not in PRODUCTS or self.efficiencies.fitted:
            return dtype
        if self.device.vendor == "host":
            # Measured 16-bit products are emulated; products on special units are assumed to be like fp32's.
            return "fp32" if dtype in self.device.matrix_tflops else dtype
        dtype = computed_as(self.device, dtype)
        return "fp8" if dtype == "fp4" else dtype

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return the family, the device's name and the efficiencies of this family alone."""
        mine = {key: entry for key, entry in self.efficiencies.entries.items()
                if key == "*" or key.split("/")[0] == self.family.value}
        return {"family": self.family.value, "device": self.device.name,
                **({} if self.corrections is None else {
                    "corrections": self.corrections.of_family(self.family, self.device).to_json()}),
                **Efficiencies(mine, self.efficiencies.fitted, self.efficiencies.least).state()}, {}

    @classmethod
    def from_state(cls, state: Mapping[str, Any], arrays: Arrays, spec: DeviceSpec | None = None) -> RooflineModel:
        """Return the model that ``state`` stored, on ``spec`` or the device that the state names.

        Raises:
            DeviceError: no such device.
            KeyError, TypeError, ValueError: the state is not of this form.
        """
        corrections = Corrections.from_json(state["corrections"]) if "corrections" in state else None
        return cls(Family(state["family"]), spec or device(state["device"]), Efficiencies.from_state(state),
                   corrections)


def heuristic_models(spec: DeviceSpec, efficiencies: Efficiencies | None = None) -> dict[Family, RooflineModel]:
    """Return every family's model on a device: with fitted efficiencies, else the defaults and shipped corrections.

    Steps were measured on NVIDIA's boards with GDDR memory, and only such boards are corrected. On others, corrections
    improve tables of kernels but worsen recorded steps of ResNet-50, BERT and GPT.
    """
    like = spec.vendor == "nvidia" and spec.memory_kind.startswith("GDDR")
    corrections = shipped_corrections() if efficiencies is None and like else None
    return {family: RooflineModel(family, spec, efficiencies, corrections) for family in Family}
