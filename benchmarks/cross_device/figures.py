"""What a transfer model knows of a device: published figures, in the units its formulas use, and a distance.

Three figures come with the architecture instead of the data sheet:

- resident threads of a unit, by compute capability (CUDA C++ Programming Guide, technical specifications);
- the cache of a unit that holds what its threads load: unified with shared memory from compute capability 7.0 on (same
  table; 7.5: the 64 of 96 KB that are not shared memory). Earlier ones are too small to keep rows and are left out;
- switching energy relative to TSMC's 16 nm process, from the power savings at equal speed that TSMC publishes for each
  step (its technology pages): 12FFC −25% against 16 nm; 10 nm −35% against 16 nm and 7 nm −40% against 10 nm; 6 nm as
  7 nm; 5 nm −30% against 7 nm; 3 nm −30% against 5 nm. Samsung's 8 nm, an extension of its 10 nm, is counted as 10 nm.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from kernel_models.device import DeviceSpec
from tracer.arrays import Float64

PROCESS_ENERGY = {
    "pascal": 1.0, "volta": 0.75, "turing": 0.75, "ampere": 0.39, "ampere-8nm": 0.65, "ada": 0.273, "hopper": 0.273,
    "blackwell": 0.273, "rtx-blackwell": 0.273, "cdna": 0.39, "cdna2": 0.39, "cdna3": 0.273, "cdna4": 0.191,
}
"""Energy of an operation by architecture, relative to 16 nm at the same clock."""
_OTHER_ENERGY = 0.273
_RESIDENT_THREADS = {"7.5": 1024, "8.6": 1536, "8.7": 1536, "8.9": 1536, "12.0": 1536}
_NEAR_CACHE_KB = {"7.0": 128, "7.2": 128, "7.5": 64, "8.0": 192, "8.6": 128, "8.7": 192, "8.9": 128, "9.0": 256,
                  "10.0": 256, "10.3": 256, "12.0": 128}
_LANES = 64
"""A unit is counted as this many lanes, so that units of 64 and of 128 lanes compare."""


@dataclass(frozen=True, slots=True)
class Figures:
    """A device as the formulas see it.

    Attributes:
        name: of the device.
        lanes: fp32 multiply-adds a clock, on the whole device.
        clock_mhz: boost clock.
        bandwidth_gbps: of its memory, 10⁹ bytes/s.
        cache_mb: last cache shared by all units, MiB.
        near_cache_mb: of the units themselves, all together, MiB; 0 where it does not keep rows.
        power_w: board power limit.
        energy: of an operation, relative to 16 nm.
        threads: resident at once, on the whole device.
        unit_threads: resident on one unit.
        generation: compute capability as a number; 6.9 and below run libraries' Maxwell-era kernels.
        stacked: whether memory is stacked (HBM); other memory keeps its error-correcting bits in line.
    """

    name: str
    lanes: float
    clock_mhz: float
    bandwidth_gbps: float
    cache_mb: float
    near_cache_mb: float
    power_w: float
    energy: float
    threads: float
    unit_threads: float
    generation: float
    stacked: bool

    @classmethod
    def of(cls, device: DeviceSpec) -> Figures:
        """The figures of a device."""
        capability = device.compute_capability
        try:
            generation = float(capability)
        except ValueError:
            generation = 8.0
        architecture = "ampere-8nm" if (device.architecture, capability) == ("ampere", "8.6") else device.architecture
        unit_threads = float(_RESIDENT_THREADS.get(capability, 2048))
        clock = device.boost_clock_mhz
        return cls(device.name, device.peak_tflops("fp32") / (2 * clock) * 1e6, clock, device.memory_bandwidth_gbps,
                   max(device.l2_mb, device.l3_mb, 0.25),
                   _NEAR_CACHE_KB.get(capability, 0) * device.sm_count / 1024, device.power_w,
                   PROCESS_ENERGY.get(architecture, _OTHER_ENERGY), unit_threads * device.sm_count, unit_threads,
                   generation, device.memory_kind.startswith("HBM"))

    @property
    def units(self) -> float:
        """Groups of 64 lanes."""
        return self.lanes / _LANES

    @property
    def chip(self) -> tuple[float, float, float, float]:
        """What boards of the same chip have in common: compute capability, lanes, cache, threads."""
        return self.generation, round(self.lanes), self.cache_mb, self.threads

    @property
    def row_cache_mb(self) -> float:
        """What keeps rows between two readings by the same unit, MiB."""
        return self.cache_mb + self.near_cache_mb

    def state(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Metric:
    """How far two devices are from each other, and how quickly a source's weight falls with that.

    Attributes:
        generation: weight of a step of one in compute capability.
        kernels: of the change from Maxwell-era to Volta-era library kernels.
        size: of a doubling of lanes, power or (at three fifths) bandwidth and cache.
        memory: of stacked against other memory.
        power: weights are distance to the minus this (Shepard's inverse-distance weighting).
    """

    generation: float = 1.0
    kernels: float = 0.0
    size: float = 0.5
    memory: float = 0.0
    power: float = 4.0

    def place(self, figures: Figures) -> Float64:
        """Coordinates whose Euclidean distance is meant."""
        f = figures
        return np.array([
            self.generation * f.generation, self.kernels * (f.generation >= 7), self.memory * f.stacked,
            self.size * np.log2(f.lanes), self.size * np.log2(f.power_w),
            0.6 * self.size * np.log2(f.bandwidth_gbps), 0.6 * self.size * np.log2(f.cache_mb)])

    def distances(self, target: Figures, sources: list[Figures]) -> Float64:
        """From a device to others, [n]."""
        here = self.place(target)
        return np.array([np.linalg.norm(self.place(source) - here) for source in sources])

    def weights(self, target: Figures, sources: list[Figures]) -> Float64:
        """Share of each source in a prediction for the target, [n]; a device itself takes all of it.

        So do sources of the same chip on another board: they run the same kernels in the same waves, and the formulas
        know what memory and power differ by.
        """
        distance = np.maximum(self.distances(target, sources), 1e-6)
        weight = (distance / distance.min()) ** -self.power
        same = np.array([source.chip == target.chip for source in sources])
        if same.any():
            weight = np.where(same, weight, 0.0)
        return weight / weight.sum()
