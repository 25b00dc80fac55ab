"""Matrix products on a device never measured: padded operations at the power-limited rate, and what a source teaches.

    blocks = batch · ⌈m / tile m⌉ · ⌈n / tile n⌉                    (the tile a source's library would take)
    padded = 2 · blocks · tile m · tile n · k                        operations
    base   = t₀ + (compute(padded)⁴ + memory(bytes)⁴)^¼              compute from ``PowerLaw``
    time   = max(floor, base · exp(residual))                        boosted trees over dimensionless features

The floor is how often the host launches such an operation (a smooth maximum). The residual is learned on one source
GPU; its features (depth k, waves and their tail, tile, balance of compute and memory, padding, operands against the
cache) mean the same on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cross_device.figures import Figures
from cross_device.measured import Measured
from cross_device.power import PowerLaw, best_rates, fit_power_law
from cross_device.tile_choice import TileChoice, tiles_of
from kernel_models.op_call import Arrays
from tracer.arrays import Float64

if TYPE_CHECKING:
    from kernel_models.learned.trees import Trees

_ITEM = 4
_MEMORY_SHARE = 0.8
"""Of the bandwidth, that operands are read with; the residual corrects it."""
_START_US = 5.0
_CORNER = 4.0
_FLOOR_CORNER = 8.0
_FLOOR_QUANTILE, _ABOVE_FLOOR = 0.01, 1.2
"""The quickest calls of a source take its floor; the residual is fitted to those that take this much longer."""
_LARGE_OPERATIONS = 1e9
FEATURES = ("depth", "waves", "tail", "area", "along_n", "balance", "padding", "duration", "stride", "reused",
            "weights")
"""All features of the residual; a fit may use some of them."""


def operations(dims: Float64) -> Float64:
    """Multiplies and adds of products, [n]."""
    return 2 * dims.prod(axis=1)


def base_time(law: PowerLaw, figures: Figures, dims: Float64, tiles: Float64) -> tuple[Float64, dict[str, Float64]]:
    """Time before the residual, µs [n], and every feature of the residual, [n] each."""
    batch, m, n, k = dims.T
    along_n, along_m = tiles.T
    blocks = batch * np.ceil(m / along_m) * np.ceil(n / along_n)
    waves = blocks / figures.units
    area = along_n * along_m
    compute = law.duration_us(figures, 2 * blocks * area * k)
    operands = _ITEM * (m * k + n * k)
    memory = (batch * operands + _ITEM * batch * m * n) / (figures.bandwidth_gbps * 1e3 * _MEMORY_SHARE)
    base = _START_US + (compute ** _CORNER + memory ** _CORNER) ** (1 / _CORNER)
    return base, {
        "depth": np.log2(k), "waves": np.log2(waves), "tail": np.log(waves / np.ceil(waves)), "area": np.log2(area),
        "along_n": np.log2(along_n), "balance": np.log(compute / memory),
        "padding": np.log(batch * m * n / (blocks * area)), "duration": np.log(base), "stride": np.log2(n),
        "reused": np.log2(operands / (figures.cache_mb * 2 ** 20)), "weights": np.log2(n * k),
    }


@dataclass(frozen=True, slots=True)
class ProductExpert:
    """One source's tiles and residual, and the power law common to all."""

    law: PowerLaw
    features: tuple[str, ...]
    tiles: TileChoice
    residual: Trees
    floor_us: float = 1.0

    def time_us(self, figures: Figures, dims: Float64) -> Float64:
        """On a device, [n]."""
        base, features = base_time(self.law, figures, dims, self.tiles.predict(figures, dims))
        time = base * np.exp(self.residual.predict(_matrix(features, self.features)))
        return self.floor_us * (1 + (time / self.floor_us) ** _FLOOR_CORNER) ** (1 / _FLOOR_CORNER)

    @staticmethod
    def sizes_of(dims: Float64) -> tuple[Float64, Float64]:
        """Work and what is extrapolated in: operations both, [n]."""
        return operations(dims), operations(dims)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """What a profile stores."""
        arrays = {f"tiles.{name}": value for name, value in self.tiles.arrays().items()}
        arrays.update({f"residual.{name}": value for name, value in self.residual.arrays().items()})
        return {"law": self.law.state(), "features": list(self.features), "floor_us": self.floor_us}, arrays

    @classmethod
    def from_state(cls, plain: dict[str, Any], arrays: Arrays) -> ProductExpert:
        """The inverse of ``state``."""
        from kernel_models.learned.trees import Trees

        def part(prefix: str) -> Arrays:
            return {name.removeprefix(prefix): value for name, value in arrays.items() if name.startswith(prefix)}

        return cls(PowerLaw(**plain["law"]), tuple(plain["features"]), TileChoice.from_arrays(part("tiles.")),
                   Trees.from_arrays(part("residual.")), float(plain["floor_us"]))


def _matrix(features: dict[str, Float64], names: Sequence[str]) -> Any:
    return np.stack([features[name] for name in names], axis=1).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Products:
    """How product experts are fitted.

    Attributes:
        law: the power law's start; energy, boost, τ and the lanes in use are fitted to the sources' best rates.
        features: of the residual, some of ``FEATURES``.
        iterations, leaves, learning_rate: of the residual's trees.
        envelopes: best rates from elsewhere (other product families of the same sources), instead of the sources' own.
    """

    law: PowerLaw = field(default_factory=PowerLaw)
    features: tuple[str, ...] = FEATURES
    iterations: int = 120
    leaves: int = 15
    learning_rate: float = 0.1
    envelopes: Sequence[tuple[Figures, Float64, Float64]] = ()

    @property
    def least_large(self) -> float:
        """Operations."""
        return _LARGE_OPERATIONS

    def large(self, data: Measured) -> Any:
        """Which calls are large, [n]."""
        return operations(data.dims) >= _LARGE_OPERATIONS

    def size(self, dims: Float64) -> Float64:
        """Operations, [n]."""
        return operations(dims)

    def fit(self, sources: Sequence[Measured]) -> list[ProductExpert]:
        """An expert of each source."""
        known = {source.figures.name for source in sources}
        envelopes = [entry for entry in self.envelopes if entry[0].name in known] or [envelope(s) for s in sources]
        law = fit_power_law(envelopes, self.law)
        return [self._fit(law, source) for source in sources]

    def _fit(self, law: PowerLaw, source: Measured) -> ProductExpert:
        from cross_device.absolute_trees import fit_absolute

        tiles = np.full((len(source), 2), 128.0) if source.kernels is None else tiles_of(source.kernels)
        known = ~np.isnan(tiles[:, 0])
        source, tiles = source.rows(known), tiles[known]
        choice = TileChoice.fit(source.figures, source.dims, tiles)
        floor_us = float(np.quantile(source.time_us, _FLOOR_QUANTILE))
        above = source.time_us >= _ABOVE_FLOOR * floor_us
        if above.any():
            source, tiles = source.rows(above), tiles[above]
        base, features = base_time(law, source.figures, source.dims, tiles)
        residual = fit_absolute(_matrix(features, self.features), np.log(source.time_us / base),
                                iterations=self.iterations, learning_rate=self.learning_rate, leaves=self.leaves)
        return ProductExpert(law, self.features, choice, residual, floor_us)


def envelope(source: Measured) -> tuple[Figures, Float64, Float64]:
    """The best rates of a source: its deep products of moderate size, which no cache or address translation slows."""
    _, m, n, k = source.dims.T
    deep = (np.minimum(np.minimum(m, n), k) >= 128) & (k <= 4096)
    return source.figures, *best_rates(operations(source.dims[deep]), source.time_us[deep])


def joined(one: Sequence[Measured], other: Sequence[Measured]) -> list[tuple[Figures, Float64, Float64]]:
    """Best rates of devices over two families of products: the larger one of each duration."""
    result = []
    second = {data.figures.name: data for data in other}
    for data in one:
        rates: dict[float, float] = {}
        for part in (data, second[data.figures.name]) if data.figures.name in second else (data,):
            for duration, rate in zip(*envelope(part)[1:], strict=True):
                rates[duration] = max(rate, rates.get(duration, 0.0))
        result.append((data.figures, np.array(sorted(rates)), np.array([rates[d] for d in sorted(rates)])))
    return result
