"""Inputs and outputs of every recipe of features."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kernel_models.learned.columns import Columns, Variant
from kernel_models.tensors import itemsize
from tracer.arrays import Float64, Int64

if TYPE_CHECKING:
    from kernel_models.device import DeviceSpec

FLOOR_US = 2.0
"""A kernel that does next to nothing, microseconds: start and end of a launch on the GPUs measured so far."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of the device and of each variant, as recipes take them.

    Attributes:
        sm_count: multiprocessors.
        bandwidth_gbps: device memory, 10⁹ bytes/s.
        l2_mb: last cache, MiB.
        tflops: peak rate of each variant's dtype, 10¹²/s, matrix units where it has them, [variants].
        element_bytes: of each variant's dtype, [variants].
        causal: whether a variant masks the upper triangle, [variants].
        backward: whether a variant is a gradient, [variants].
    """

    sm_count: int
    bandwidth_gbps: float
    l2_mb: float
    tflops: tuple[float, ...]
    element_bytes: tuple[float, ...]
    causal: tuple[bool, ...]
    backward: tuple[bool, ...]

    @classmethod
    def of(cls, spec: DeviceSpec, variants: Sequence[Variant]) -> Figures:
        """The figures of a device for these variants."""
        return cls(spec.sm_count, spec.memory_bandwidth_gbps, spec.l2_mb,
                   tuple(spec.peak_tflops(dtype, matrix=True) for _, dtype, _, _ in variants),
                   tuple(float(itemsize(dtype)) for _, dtype, _, _ in variants),
                   tuple("causal" in flags for _, _, _, flags in variants),
                   tuple(kind.endswith("backward") for kind, _, _, _ in variants))

    def to_json(self) -> dict[str, Any]:
        """Plain values to store."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Figures:
        """The figures of ``to_json``."""
        return cls(int(values["sm_count"]), float(values["bandwidth_gbps"]), float(values["l2_mb"]),
                   tuple(map(float, values["tflops"])), tuple(map(float, values["element_bytes"])),
                   tuple(map(bool, values["causal"])), tuple(map(bool, values["backward"])))

    def by_row(self, columns: Columns) -> tuple[Float64, Float64]:
        """Peak rate (FLOP/µs) and element bytes of each call."""
        return np.array(self.tflops)[columns.code] * 1e6, np.array(self.element_bytes)[columns.code]


class Described(NamedTuple):
    """Features [n, f], and the baseline's time [n], µs."""

    features: npt.NDArray[np.float32]
    baseline_us: Float64


class Recipe(NamedTuple):
    """A named recipe; ``work`` tells that it needs the calls' FLOPs and bytes. Codes are 0 or more in what it gets."""

    name: str
    describe: Callable[[Columns, Figures], Described]
    work: bool = False


def parts(size: Int64, part: Int64 | int) -> Int64:
    """Return how many parts of a size, rounded up."""
    return -(-size // part)


def stack(features: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """Columns side by side."""
    result = np.empty((len(features[0]), len(features)), np.float32)
    for i, column in enumerate(features):
        result[:, i] = column
    return result
