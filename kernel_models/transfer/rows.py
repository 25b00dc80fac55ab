"""Layer norm and softmax on a device never measured: memory time and unit time of a row, added smoothly.

    memory = bytes of (read + written + read again where rows in work overflow the cache) / (bandwidth · share)
    units  = rows · (a + b · columns) / (units · clock)
    time   = t₀ + (memory^p + units^p)^(1/p)

A norm gives each row 128 threads, so resident rows = resident threads / 128, and reads it twice (mean and variance,
then the result). A softmax holds rows of up to 1,024 columns in the registers of a warp, padded to a power of two;
longer rows get a block of columns/4 threads, at most 1,024, and are read again (PyTorch: ``layer_norm_kernel.cu``,
``SoftMax.cu``). The second reading hits the cache while resident rows fit into it: a logistic of log(resident bytes /
cache).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from kernel_models.model import Arrays, Float64
from kernel_models.transfer.figures import Figures
from kernel_models.transfer.measured import Measured

_ITEM = 4
_WARP_COLUMNS = 1024
_NORM_THREADS = 128
_MOST_THREADS = 1024
_SHARED_START = np.array([np.log(300.0), np.log(1.0), np.log(1.0), 0.0, np.log(0.6), 0.0])
_LOWEST = np.array([0.0, -6.0, np.log(0.02), -4.0, np.log(0.1), -3.0])
_HIGHEST = np.array([8.0, 3.0, np.log(7.0), 4.0, np.log(3.0), 1.1])
"""log a (cycles a row and unit), log b (cycles an element), log (p − 1), log resident/cache at the middle, log width,
log of the bytes read again relative to a row."""
_OWN_START = np.log([0.8, 20.0])
_OWN_LOWEST, _OWN_HIGHEST = np.log([0.4, 1.0]), np.log([1.0, 80.0])
"""Share of the bandwidth; t₀ in µs."""


class RowWork(Enum):
    """Which kernel works on the rows."""

    NORM = "norm"
    WARP = "warp"
    BLOCK = "block"


def row_time(work: RowWork, constants: Float64, figures: Figures, rows: Float64, wide: Float64) -> Float64:
    """The formula above, µs [n]; ``constants`` are six shared and two own ones."""
    per_row, per_element, corner, middle, width, again = constants[:6]
    share, start = np.exp(constants[6:])
    if work is RowWork.WARP:
        extra: Any = 0.0
        worked = 2.0 ** np.ceil(np.log2(np.maximum(wide, 2)))
    else:
        threads = np.full(len(wide), float(_NORM_THREADS)) if work is RowWork.NORM else \
            np.clip(2.0 ** np.floor(np.log2(np.maximum(wide / 4, 1))), 32, _MOST_THREADS)
        resident = figures.threads / threads if work is RowWork.NORM else \
            figures.threads / figures.unit_threads * np.floor(figures.unit_threads / threads)
        over = np.log(resident * wide * _ITEM / (figures.cache_mb * 2 ** 20))
        extra = np.exp(again) / (1 + np.exp(-(over - middle) / np.exp(width)))
        worked = wide
    memory = _ITEM * rows * wide * (2 + extra) / (figures.bandwidth_gbps * 1e3 * share)
    units = rows * (np.exp(per_row) + np.exp(per_element) * worked) / (figures.units * figures.clock_mhz)
    p = 1 + np.exp(corner)
    longer = np.maximum(memory, units)
    return start + longer * ((memory / longer) ** p + (units / longer) ** p) ** (1 / p)


@dataclass(frozen=True, slots=True)
class RowExpert:
    """One source's constants for each kind of row work that its measurements hold."""

    constants: dict[str, Float64]
    columns_at: tuple[int, int]
    """Where a call's sizes have rows and columns."""

    def time_us(self, figures: Figures, dims: Float64) -> Float64:
        """On a device, [n]."""
        rows, wide = dims[:, self.columns_at[0]], dims[:, self.columns_at[1]]
        time = np.empty(len(dims))
        for work, here in _split(wide, norm="norm" in self.constants):
            time[here] = row_time(work, self.constants[work.value], figures, rows[here], wide[here])
        return time

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """What a profile stores."""
        return {"columns_at": list(self.columns_at)}, dict(self.constants)

    @classmethod
    def from_state(cls, plain: dict[str, Any], arrays: Arrays) -> RowExpert:
        """The inverse of ``state``."""
        return cls({name: np.asarray(value, np.float64) for name, value in arrays.items()}, tuple(plain["columns_at"]))


def _split(wide: Float64, *, norm: bool) -> list[tuple[RowWork, Any]]:
    if norm:
        return [(RowWork.NORM, np.ones(len(wide), bool))]
    return [(RowWork.WARP, wide <= _WARP_COLUMNS), (RowWork.BLOCK, wide > _WARP_COLUMNS)]


@dataclass(frozen=True, slots=True)
class Rows:
    """How row experts are fitted: constants common to all sources first, then each source's own, drawn to those.

    Attributes:
        norm: whether it is a norm (rows, columns) or a softmax (outer, reduced, inner).
        drawn: how strongly a source's constants are drawn to the common ones; 0 for not at all.
        least_bytes: smaller calls are left out of the fit.
        large_bytes: of a call whose error counts in choices.
    """

    norm: bool
    drawn: float = 0.3
    least_bytes: float = 4e6
    large_bytes: float = 3.2e7

    def _bytes(self, dims: Float64) -> Float64:
        return 2 * _ITEM * dims[:, 0] * dims[:, 1]

    def large(self, data: Measured) -> Any:
        """Which calls are large, [n]."""
        return self._bytes(data.dims) >= self.large_bytes

    def size(self, dims: Float64) -> Float64:
        """Columns, [n]."""
        return dims[:, 1]

    def fit(self, sources: Sequence[Measured]) -> list[RowExpert]:
        """An expert of each source."""
        sources = [source.rows(self._bytes(source.dims) >= self.least_bytes) for source in sources]
        found: list[dict[str, Float64]] = [{} for _ in sources]
        for work in ([RowWork.NORM] if self.norm else [RowWork.WARP, RowWork.BLOCK]):
            parts = []
            for source in sources:
                here = dict(_split(source.dims[:, 1], norm=self.norm))[work]
                parts.append(source.rows(here))
            for constants, own in zip(found, self._fit(work, parts), strict=True):
                constants[work.value] = own
        return [RowExpert(constants, (0, 1)) for constants in found]

    def _errors(self, work: RowWork, constants: Float64, data: Measured) -> Float64:
        rows, wide = data.dims[:, 0], data.dims[:, 1]
        weight = np.sqrt(np.clip(self._bytes(data.dims) / self.large_bytes, 0.1, 2) / max(len(data), 1) * 100)
        return weight * np.log(row_time(work, constants, data.figures, rows, wide) / data.time_us)

    def _fit(self, work: RowWork, parts: list[Measured]) -> list[Float64]:
        from scipy.optimize import least_squares

        def together(values: Float64) -> Float64:
            return np.concatenate([0.05 * (values[:6] - _SHARED_START), *(
                self._errors(work, np.concatenate([values[:6], values[6 + 2 * i:8 + 2 * i]]), part)
                for i, part in enumerate(parts))])

        n = len(parts)
        start = np.concatenate([_SHARED_START, np.tile(_OWN_START, n)])
        lowest, highest = (np.concatenate([shared, np.tile(own, n)])
                           for shared, own in ((_LOWEST, _OWN_LOWEST), (_HIGHEST, _OWN_HIGHEST)))
        common = least_squares(together, start, loss="soft_l1", f_scale=0.1, bounds=(lowest, highest)).x
        result = []
        for i, part in enumerate(parts):
            prior = np.concatenate([common[:6], common[6 + 2 * i:8 + 2 * i]])

            def alone(values: Float64, prior: Float64 = prior, part: Measured = part) -> Float64:
                return np.concatenate([self.drawn * (values - prior), self._errors(work, values, part)])

            result.append(least_squares(alone, prior, loss="soft_l1", f_scale=0.1, bounds=(
                np.concatenate([_LOWEST, _OWN_LOWEST]) - 1e-9, np.concatenate([_HIGHEST, _OWN_HIGHEST]) + 1e-9)).x)
        return result
