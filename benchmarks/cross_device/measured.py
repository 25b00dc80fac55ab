"""Measurements of one family on one device, as columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cross_device.figures import Figures
from kernel_models.op_call import DIMENSIONS, Family, OpCall
from tracer.arrays import Float64


@dataclass(frozen=True, slots=True)
class Measured:
    """What one device took for n calls of one family.

    Attributes:
        figures: of the device.
        dims: as ``DIMENSIONS`` names them, [n, d].
        time_us: measured, [n].
        kernels: names of the kernels that ran, [n], where known; only fits look at them.
    """

    figures: Figures
    dims: Float64
    time_us: Float64
    kernels: npt.NDArray[np.object_] | None = None

    def __len__(self) -> int:
        return len(self.time_us)

    def rows(self, which: npt.NDArray[np.bool_] | npt.NDArray[np.int64]) -> Measured:
        """Some of the calls."""
        return Measured(self.figures, self.dims[which], self.time_us[which],
                        None if self.kernels is None else self.kernels[which])


def columns(family: Family, calls: Sequence[OpCall]) -> Float64:
    """Sizes of calls as floats, [n, d]; sizes of zero count as one."""
    sizes = np.array([call.dims for call in calls], np.float64)
    return np.maximum(sizes.reshape(len(calls), len(DIMENSIONS[family])), 1.0)
