"""Layer norm and softmax on a device never measured: memory time and unit time of a row, added smoothly.

    memory = bytes of (read + written + read again where rows in work overflow the cache) / (bandwidth · share)
    units  = rows · (a + b · columns) / (units · clock)
    both   = (memory^p + units^p)^(1/p)
    alone  = (memory + units − both) / (1 + waves / waves in step)
    time   = max(floor, t₀ + both + alone)                          (a smooth maximum)

A norm gives each row 128 threads, so resident rows = resident threads / 128, and reads it twice (mean and variance,
then the result). A softmax holds rows of up to 1,024 columns in the registers of a warp, padded to a power of two;
longer rows get a block of 32 to 512 threads, columns/8 rounded up to a power of two, and are read again (PyTorch:
``layer_norm_kernel.cu``, ``SoftMax.cu`` and its ``SoftMax_getBlockSize``). The second reading hits the caches while
resident rows fit into them: a logistic of log(resident bytes / caches).

Blocks that start together read together, then compute together: memory and units take turns until the blocks have
drifted apart, which is what ``alone`` adds. Waves are rows over resident rows.

The floor is how often the host launches such an operation: calls that the device does faster take no less.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from cross_device.figures import Figures
from cross_device.measured import Measured
from kernel_models.op_call import Arrays
from tracer.arrays import Float64

_ITEM = 4
_TOLERANCE = 1e-5
"""Of fits: relative change of the sum of squares, and of the constants."""
_STEP = 1e-5
_WARP_COLUMNS = 1024
_NORM_THREADS = 128
_LEAST_THREADS, _MOST_THREADS = 32, 512
_FLOOR_CORNER = 8.0
_WARP, _VECTOR = 32, 4
_SHARED_START = np.array([np.log(300.0), np.log(1.0), np.log(1.0), 0.0, np.log(0.6), 0.0, 0.0])
_LOWEST = np.array([0.0, -6.0, np.log(0.02), -4.0, np.log(0.1), -3.0, -5.0])
_HIGHEST = np.array([8.0, 3.0, np.log(7.0), 4.0, np.log(3.0), 1.1, 3.5])
_SHARED, _AGAIN = len(_SHARED_START), 5
"""log a (cycles a row and unit), log b (cycles an element), log (p − 1), log resident/cache at the middle, log width,
log of the bytes read again relative to a row (a norm's are known: one row), log of the waves that start in step."""
_OWN_START = np.log([0.8, 12.0, 35.0])
_OWN_LOWEST, _OWN_HIGHEST = np.log([0.4, 1.0, 1.0]), np.log([1.0, 80.0, 150.0])
_OWN = len(_OWN_START)
"""Share of the bandwidth; t₀ and the floor in µs."""


class RowWork(Enum):
    """Which kernel works on the rows."""

    NORM = "norm"
    WARP = "warp"
    BLOCK = "block"


def block_threads(wide: Float64) -> Float64:
    """Threads of a softmax's block for rows of more than 1,024 columns, [n] (``SoftMax_getBlockSize``, ILP of 4)."""
    half = np.maximum(np.minimum(wide // 4, 1024) // 2, 1)
    return np.clip(2.0 ** np.ceil(np.log2(half)), _LEAST_THREADS, _MOST_THREADS)


def row_time(
    work: RowWork, constants: Sequence[Any] | Float64, figures: Figures | _Rows, rows: Float64, wide: Float64
) -> Float64:
    """The formula above, µs [n]; ``constants`` are seven shared and three own ones, each a number or one a row."""
    per_row, per_element, corner, middle, width, again, locked = constants[:_SHARED]
    share, start, floor = (np.exp(value) for value in constants[_SHARED:])
    if work is RowWork.WARP:
        extra: Any = 0.0
        worked = 2.0 ** np.ceil(np.log2(np.maximum(wide, 2)))
        resident: Any = figures.threads / _WARP
    else:
        if work is RowWork.NORM:
            resident, worked = figures.threads / _NORM_THREADS, wide
        else:
            threads = block_threads(wide)
            resident = figures.threads / figures.unit_threads * np.floor(figures.unit_threads / threads)
            worked = np.ceil(wide / (_VECTOR * threads)) * _VECTOR * threads
        over = np.log(resident * wide * _ITEM / (figures.row_cache_mb * 2 ** 20))
        extra = np.exp(again) / (1 + np.exp(-(over - middle) / np.exp(width)))
    memory = _ITEM * rows * wide * (2 + extra) / (figures.bandwidth_gbps * 1e3 * share)
    units = rows * (np.exp(per_row) + np.exp(per_element) * worked) / (figures.units * figures.clock_mhz)
    overlapped = _norm(memory, units, 1 + np.exp(corner))
    alone = (memory + units - overlapped) / (1 + rows / (resident * np.exp(locked)))
    return _norm(start + overlapped + alone, floor, _FLOOR_CORNER)


def _norm(one: Float64, other: Any, power: float) -> Float64:
    """(one^p + other^p)^(1/p) of positive numbers, [n]."""
    longer = np.maximum(one, other)
    return longer * ((one / longer) ** power + (other / longer) ** power) ** (1 / power)


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

    @staticmethod
    def sizes_of(dims: Float64) -> tuple[Float64, Float64]:
        """Work, bytes read once and written, and what is extrapolated in, columns, [n]."""
        return 2 * _ITEM * dims[:, 0] * dims[:, 1], dims[:, 1]

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
    least_bytes: float = 1e5
    large_bytes: float = 3.2e7

    @property
    def least_large(self) -> float:
        """Bytes."""
        return self.large_bytes

    def large(self, data: Measured) -> Any:
        """Which calls are large, [n]."""
        return RowExpert.sizes_of(data.dims)[0] >= self.large_bytes

    def size(self, dims: Float64) -> Float64:
        """Columns, [n]."""
        return dims[:, 1]

    def fit(self, sources: Sequence[Measured]) -> list[RowExpert]:
        """An expert of each source."""
        sources = [source.rows(RowExpert.sizes_of(source.dims)[0] >= self.least_bytes) for source in sources]
        found: list[dict[str, Float64]] = [{} for _ in sources]
        for work in ([RowWork.NORM] if self.norm else [RowWork.WARP, RowWork.BLOCK]):
            parts = []
            for source in sources:
                here = dict(_split(source.dims[:, 1], norm=self.norm))[work]
                parts.append(source.rows(here))
            for constants, own in zip(found, self._fit(work, parts), strict=True):
                constants[work.value] = own
        return [RowExpert(constants, (0, 1)) for constants in found]

    def _errors(self, work: RowWork, shared: Float64, own: Float64, data: _Rows) -> Float64:
        time = row_time(work, [*shared, *own[:, data.source]], data, data.rows, data.wide)
        return data.weight * np.log(time / data.time_us)

    def _fit(self, work: RowWork, parts: list[Measured]) -> list[Float64]:
        """Constants of each source [10]; those of the formula common to all are found with all sources at once."""
        from scipy.optimize import least_squares

        n = len(parts)
        lowest, highest = _LOWEST.copy(), _HIGHEST.copy()
        if work is RowWork.NORM:
            lowest[_AGAIN], highest[_AGAIN] = -1e-6, 1e-6
        together = _Rows.of(parts, self.large_bytes)
        prior = 0.05 * np.eye(_SHARED)

        def split(values: Float64) -> tuple[Float64, Float64]:
            return values[:_SHARED], values[_SHARED:].reshape(_OWN, n)

        def errors(values: Float64) -> Float64:
            shared, own = split(values)
            return np.concatenate([prior @ (shared - _SHARED_START), self._errors(work, shared, own, together)])

        def jacobian(values: Float64) -> Float64:
            """Finite differences; an own constant of one source moves no other's errors, so all move at once."""
            shared, own = split(values)
            found = np.zeros((_SHARED + len(together.rows), len(values)))
            found[:_SHARED, :_SHARED] = prior
            middle = self._errors(work, shared, own, together)
            every = np.arange(len(together.rows))
            for i, step in enumerate(_STEP * np.eye(_SHARED)):
                found[_SHARED:, i] = (self._errors(work, shared + step, own, together) - middle) / _STEP
            for i, step in enumerate(_STEP * np.eye(_OWN)[:, :, None]):
                moved = (self._errors(work, shared, own + step, together) - middle) / _STEP
                found[_SHARED + every, _SHARED + i * n + together.source] = moved
            return found

        start = np.concatenate([_SHARED_START, np.repeat(_OWN_START, n)])
        bounds = (np.concatenate([lowest, np.repeat(_OWN_LOWEST, n)]),
                  np.concatenate([highest, np.repeat(_OWN_HIGHEST, n)]))
        shared, owns = split(least_squares(errors, start, jacobian, loss="soft_l1", f_scale=0.1, bounds=bounds,
                                           ftol=_TOLERANCE, xtol=_TOLERANCE).x)
        bounds = (np.concatenate([lowest, _OWN_LOWEST]) - 1e-9, np.concatenate([highest, _OWN_HIGHEST]) + 1e-9)
        result = []
        for own, part in zip(owns.T, parts, strict=True):
            drawn_to, rows = np.concatenate([shared, own]), _Rows.of([part], self.large_bytes)

            def alone(values: Float64, drawn_to: Float64 = drawn_to, rows: _Rows = rows) -> Float64:
                return np.concatenate([self.drawn * (values - drawn_to), self._errors(
                    work, values[:_SHARED], values[_SHARED:, None], rows)])

            result.append(least_squares(alone, drawn_to, loss="soft_l1", f_scale=0.1, bounds=bounds,
                                        ftol=_TOLERANCE, xtol=_TOLERANCE).x)
        return result


@dataclass(frozen=True, slots=True)
class _Rows:
    """Calls of several sources with the figures of each call's device, as ``row_time`` reads them: all are [n].

    Attributes:
        rows, wide, time_us: of the calls.
        source: place of the device among the sources.
        weight: of an error; every source counts alike, large calls more than small ones.
    """

    rows: Float64
    wide: Float64
    time_us: Float64
    source: npt.NDArray[np.int64]
    weight: Float64
    threads: Float64
    unit_threads: Float64
    row_cache_mb: Float64
    bandwidth_gbps: Float64
    units: Float64
    clock_mhz: Float64

    @classmethod
    def of(cls, parts: Sequence[Measured], large_bytes: float) -> _Rows:
        """Of the sources' calls."""
        source = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        dims = np.concatenate([part.dims for part in parts])
        share = np.clip(2 * _ITEM * dims[:, 0] * dims[:, 1] / large_bytes, 0.1, 2)
        counts = np.array([max(len(part), 1) for part in parts], float)[source]
        figures = (np.array([getattr(part.figures, name) for part in parts])[source] for name in (
            "threads", "unit_threads", "row_cache_mb", "bandwidth_gbps", "units", "clock_mhz"))
        return cls(dims[:, 0], dims[:, 1], np.concatenate([part.time_us for part in parts]), source,
                   np.sqrt(share / counts * 100), *figures)
