"""Elementwise work on a device never measured: bytes over a share of its memory bandwidth.

    time = max(floor, t₀ + bytes / (bandwidth · share))        (a smooth maximum)

Each source GPU teaches floor, t₀ and share, for kernels of one input and for those of more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cross_device.figures import Figures
from cross_device.measured import Measured
from kernel_models.op_call import Arrays
from tracer.arrays import Float64

_ITEM = 4
"""Bytes of an fp32 element."""
_CORNER = 8.0
_START = np.log([0.8, 10.0, 25.0])
"""Share of the bandwidth, t₀ and floor in µs."""


def streamed_bytes(dims: Float64) -> Float64:
    """Read and written, [n]."""
    return _ITEM * (dims[:, 0] + dims[:, 2])


@dataclass(frozen=True, slots=True)
class StreamingExpert:
    """One source's logarithms of share, t₀ and floor: a row for one input, a row for more, [2, 3]."""

    constants: Float64

    def time_us(self, figures: Figures, dims: Float64) -> Float64:
        """On a device, [n]."""
        share, start, floor = np.exp(self.constants[(dims[:, 1] > 1).astype(int)]).T
        moved = start + streamed_bytes(dims) / (figures.bandwidth_gbps * 1e3 * share)
        return (moved ** _CORNER + floor ** _CORNER) ** (1 / _CORNER)

    @staticmethod
    def sizes_of(dims: Float64) -> tuple[Float64, Float64]:
        """Work and what is extrapolated in: bytes both, [n]."""
        return streamed_bytes(dims), streamed_bytes(dims)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """What a profile stores."""
        return {}, {"constants": self.constants}

    @classmethod
    def from_state(cls, _: dict[str, Any], arrays: Arrays) -> StreamingExpert:
        """The inverse of ``state``."""
        return cls(np.asarray(arrays["constants"], np.float64).reshape(2, 3))


@dataclass(frozen=True, slots=True)
class Streaming:
    """How streaming experts are fitted.

    Attributes:
        large_bytes: of a call whose error counts in choices: larger than every cache.
    """

    large_bytes: float = 3.2e7

    @property
    def least_large(self) -> float:
        """Bytes."""
        return self.large_bytes

    def large(self, data: Measured) -> Any:
        """Which calls are large, [n]."""
        return streamed_bytes(data.dims) >= self.large_bytes

    def size(self, dims: Float64) -> Float64:
        """Bytes, [n]."""
        return streamed_bytes(dims)

    def fit(self, sources: Sequence[Measured]) -> list[StreamingExpert]:
        """An expert of each source."""
        return [self._fit(source) for source in sources]

    def _fit(self, source: Measured) -> StreamingExpert:
        from scipy.optimize import least_squares

        constants = np.tile(_START, (2, 1))
        for more in (0, 1):
            data = source.rows((source.dims[:, 1] > 1) == bool(more))
            if not len(data):
                continue
            weight = np.sqrt(np.clip(streamed_bytes(data.dims) / self.large_bytes, 0.05, 4))

            def errors(values: Float64, data: Measured = data, weight: Float64 = weight) -> Float64:
                expert = StreamingExpert(np.tile(values, (2, 1)))
                return weight * np.log(expert.time_us(data.figures, data.dims) / data.time_us)

            constants[more] = least_squares(errors, _START, loss="soft_l1", f_scale=0.03).x
        return StreamingExpert(constants)
