"""``TransferModel``: several GPUs' measurements of one family, made into times on a GPU that was never measured.

Every source GPU gives an expert: formulas in a device's published figures, with constants (and for products a
residual) that this source taught. A prediction for another device asks each expert with that device's figures and
takes the mean of the logarithms, weighted by how near the source is to it (``Metric``). The 80% interval comes from
predicting each source by the others: as wide as those errors for every other chip (sources with a near neighbour were
predicted no better than those without), narrower for another board of a source's chip, down to the error of sources on
calls that were not fitted. Calls that the host decides, and calls larger than any that was measured, have widths of
their own (``Size``).

    model = TransferModel(Family.SOFTMAX).fit([measured_p100, measured_v100, …])
    times = model.on(device("l4")).predict(calls)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cross_device.choices import metric_of, recipe_of
from cross_device.figures import Figures, Metric
from cross_device.measured import Measured, columns
from cross_device.products import ProductExpert
from cross_device.rows import RowExpert
from cross_device.streaming import StreamingExpert
from kernel_models.device import DeviceSpec
from kernel_models.op_call import Arrays, Family, OpCall, Source, Times
from tracer.arrays import Float64

_INTERVAL = 0.8
_LEAST_HALF_WIDTH = 0.02
_DTYPE = "fp32"
_EXPERTS: dict[Family, Any] = {Family.ELEMENTWISE: StreamingExpert, Family.NORM: RowExpert, Family.SOFTMAX: RowExpert,
                               Family.GEMM: ProductExpert}


class Expert(Protocol):
    """What one source teaches about every device."""

    def time_us(self, figures: Figures, dims: Float64) -> Float64:
        """Times of calls on a device, [n]."""
        ...

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """What a profile stores."""
        ...


class Recipe(Protocol):
    """How experts of a family are fitted."""

    @property
    def least_large(self) -> float:
        """Work of the least call that counts in choices, bytes or operations."""
        ...

    def fit(self, sources: Sequence[Measured]) -> Sequence[Expert]:
        """An expert of each source."""
        ...

    def large(self, data: Measured) -> Any:
        """Which calls count in choices, [n]."""
        ...

    def size(self, dims: Float64) -> Float64:
        """What is extrapolated in: bytes, columns or operations, [n]."""
        ...


_LEAST_WEIGHT = 1e-4
_SMALLER = 0.75
_MOST_CALLS = 3000
"""Of a device, that take part in residuals."""


def mixed(metric: Metric, experts: Sequence[Expert], sources: list[Figures], target: Figures, dims: Float64) -> Float64:
    """The experts' times on a device, [n]: geometric mean by weight; an expert without weight is not asked."""
    weights = metric.weights(target, sources)
    weights = np.where(weights > _LEAST_WEIGHT, weights, 0.0)
    total = sum(weight * np.log(expert.time_us(target, dims))
                for weight, expert in zip(weights, experts, strict=True) if weight)
    return np.exp(total / weights.sum())


def leave_one_out(
    recipe: Recipe, metrics: Sequence[Metric], data: Sequence[Measured], *, larger: bool = False, every: bool = False
) -> list[list[Float64]]:
    """Errors log(predicted / measured) of large calls when each device in turn is unknown.

    Args:
        recipe, metrics, data: how to fit, how to weight, and one entry a device.
        larger: also leave out sizes: fit to the smaller three quarters and predict sizes above those.
        every: errors of small calls too.

    Returns:
        Errors [metrics][devices][n].
    """
    errors: list[list[Float64]] = [[] for _ in metrics]
    for left in data:
        others = [other for other in data if other is not left]
        tested = np.ones(len(left), bool) if every else recipe.large(left)
        if larger:
            limit = float(np.quantile(recipe.size(left.dims), _SMALLER))
            others = [other.rows(recipe.size(other.dims) <= limit) for other in others]
            tested = tested & (recipe.size(left.dims) > limit)
        sources = [other.figures for other in others]
        kept = left.rows(tested)
        logs = np.stack([np.log(expert.time_us(left.figures, kept.dims)) for expert in recipe.fit(others)])
        for found, metric in zip(errors, metrics, strict=True):
            found.append(metric.weights(left.figures, sources) @ logs - np.log(kept.time_us))
    return errors


class Size(Enum):
    """What an interval depends on beside the device."""

    SMALL = "small"
    """Too short to count in choices: often the host decides the time."""
    LARGE = "large"
    BEYOND = "beyond"
    """Larger than anything measured."""


@dataclass(frozen=True)
class Residuals:
    """Errors log(predicted / measured) of calls that took no part in the fit.

    Attributes:
        own: by size, [devices][n]: of every other call on sources, fitted to the calls between; of larger sizes,
            fitted to the smaller ones.
        far: by size, [devices][n]: of each device when it is unknown.
    """

    own: dict[Size, list[Float64]]
    far: dict[Size, list[Float64]]

    @classmethod
    def of(cls, recipe: Recipe, metric: Metric, data: Sequence[Measured]) -> Residuals:
        """Fit to parts of the data and predict the rest; of very many calls some, picked at random."""
        random = np.random.default_rng(0)
        data = [part.rows(random.permutation(len(part))[:_MOST_CALLS]) for part in data]
        large = [recipe.large(part) for part in data]
        odd = [np.arange(len(part)) % 2 == 1 for part in data]
        above = [recipe.size(part.dims) > np.quantile(recipe.size(part.dims), _SMALLER) for part in data]
        own = _on_themselves(recipe, data, odd)
        far = leave_one_out(recipe, [metric], data, every=True)[0]
        return cls(
            {Size.SMALL: [e[~counts[left]] for e, counts, left in zip(own, large, odd, strict=True)],
             Size.LARGE: [e[counts[left]] for e, counts, left in zip(own, large, odd, strict=True)],
             Size.BEYOND: _on_themselves(recipe, data, above)},
            {Size.SMALL: [e[~counts] for e, counts in zip(far, large, strict=True)],
             Size.LARGE: [e[counts] for e, counts in zip(far, large, strict=True)],
             Size.BEYOND: leave_one_out(recipe, [metric], data, larger=True)[0]})


def _on_themselves(recipe: Recipe, data: Sequence[Measured], left: Sequence[Any]) -> list[Float64]:
    """Errors of the calls marked in ``left`` [devices][n] when the others are fitted."""
    experts = recipe.fit([part.rows(~out) for part, out in zip(data, left, strict=True)])
    tested = [part.rows(out) for part, out in zip(data, left, strict=True)]
    return [np.log(expert.time_us(part.figures, part.dims) / part.time_us)
            for expert, part in zip(experts, tested, strict=True)]


@dataclass
class TransferModel:
    """A family's model for any device, fitted on several.

    Args:
        family: elementwise, norm, softmax or GEMM.
        batched: for GEMM, whether it is for batched products (``bmm``) or single ones (``linear``, ``mm``, ``addmm``).
        recipe, metric: how to fit and how to weight sources; by default what leaving out train GPUs chose
            (``cross_device.choices``).

    Attributes:
        experts_, sources_: one of each source GPU.
        own_spread_, far_spread_: half-widths of the 80% interval by size, log time: on sources, on a left-out source.
        largest_: size above which a call is larger than anything measured, as the recipe counts sizes.
        far_: mean distance of a left-out source from its nearest one.
    """

    family: Family
    batched: bool = False
    recipe: Any = None
    metric: Metric | None = None

    def fit(self, data: Sequence[Measured], *, residuals: Residuals | None = None) -> TransferModel:
        """Fit to several devices.

        Args:
            data: measurements, one entry a device; three devices at least.
            residuals: errors of calls left out, where they are known already.
        """
        if len(data) < 3:
            raise ValueError(f"A transfer model needs three devices or more; there are {len(data)}.")
        recipe = self.recipe or recipe_of(self.family, self.batched)
        metric = self._metric()
        self.sources_ = [entry.figures for entry in data]
        self.experts_ = list(recipe.fit(data))
        self.largest_ = float(np.median([recipe.size(entry.dims).max() for entry in data]))
        left = residuals or Residuals.of(recipe, metric, data)
        self.own_spread_ = {size: spread(left.own[size]) for size in Size}
        self.far_spread_ = {size: max(spread(left.far[size], elsewhere=True), self.own_spread_[size]) for size in Size}
        self.far_ = float(np.mean([metric.distances(f, [g for g in self.sources_ if g is not f]).min()
                                   for f in self.sources_]))
        return self

    def on(self, device: DeviceSpec | Figures) -> TransferredModel:
        """The model of one device."""
        figures = device if isinstance(device, Figures) else Figures.of(device)
        metric = self._metric()
        recipe = self.recipe or recipe_of(self.family, self.batched)
        nearness = 1.0
        if any(source.chip == figures.chip for source in self.sources_):
            nearness = min(1.0, float(metric.distances(figures, self.sources_).min()) / self.far_)
        share = {Size.LARGE: nearness, Size.BEYOND: nearness, Size.SMALL: float(figures not in self.sources_)}
        spreads = {size: self.own_spread_[size] + share[size] * (self.far_spread_[size] - self.own_spread_[size])
                   for size in Size}
        return TransferredModel(self.family, figures, self.batched, metric, self.sources_, self.experts_, spreads,
                                recipe.least_large, self.largest_)

    def _metric(self) -> Metric:
        return self.metric or metric_of(self.family, self.batched)


@dataclass(frozen=True)
class TransferredModel:
    """A family's model on one device that was never measured, or on a source.

    Attributes:
        family, figures: what it prices, and where.
        batched: for GEMM, whether it prices batched products.
        metric, sources, experts: what it was made from.
        spreads: half-widths of the 80% interval by size, log time.
        least_large, largest: limits of the sizes: in what the family's work is counted in (bytes, operations), and in
            what it is extrapolated in (``sizes_of``).
    """

    family: Family
    figures: Figures
    batched: bool
    metric: Metric
    sources: list[Figures]
    experts: list[Any]
    spreads: dict[Size, float]
    least_large: float
    largest: float
    source: Source = Source.LEARNED

    def covers(self, calls: Sequence[OpCall]) -> npt.NDArray[np.bool_]:
        """fp32 calls of the family: softmaxes over the last dimension, layer norms, dense elementwise work."""
        return np.array([self._covers(call) for call in calls], bool)

    def _covers(self, call: OpCall) -> bool:
        if call.family is not self.family or call.dtype != _DTYPE:
            return False
        if self.family is Family.GEMM:
            return call.kind == "bmm" if self.batched else call.kind != "grouped" and call.dims[0] == 1
        if self.family is Family.SOFTMAX:
            return call.kind == "softmax" and call.dims[2] == 1
        if self.family is Family.NORM:
            return call.kind == "layer_norm"
        return call.layout == "" and call.dims[1] > 0

    def predict(self, calls: Sequence[OpCall]) -> Times:
        """Times of calls of this family."""
        return self.predict_dims(columns(self.family, calls))

    def predict_dims(self, dims: Float64) -> Times:
        """Times of sizes as ``DIMENSIONS`` names them, [n, d]."""
        time = mixed(self.metric, self.experts, self.sources, self.figures, dims)
        work, extent = _EXPERTS[self.family].sizes_of(dims)
        beyond, large, small = (self.spreads[size] for size in (Size.BEYOND, Size.LARGE, Size.SMALL))
        width = np.exp(np.where(extent > self.largest, beyond, np.where(work >= self.least_large, large, small)))
        return Times(time, time / width, time * width)

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """What a profile stores."""
        arrays: Arrays = {}
        plain = []
        for i, expert in enumerate(self.experts):
            values, found = expert.state()
            plain.append(values)
            arrays.update({f"{i}/{name}": value for name, value in found.items()})
        return {"family": self.family.value, "figures": self.figures.state(), "batched": self.batched,
                "metric": asdict(self.metric), "sources": [f.state() for f in self.sources], "experts": plain,
                "spreads": {size.value: width for size, width in self.spreads.items()},
                "limits": [self.least_large, self.largest]}, arrays

    @classmethod
    def from_state(cls, plain: dict[str, Any], arrays: Arrays) -> TransferredModel:
        """The inverse of ``state``."""
        family = Family(plain["family"])
        experts = []
        for i, values in enumerate(plain["experts"]):
            prefix = f"{i}/"
            experts.append(_EXPERTS[family].from_state(
                values, {n.removeprefix(prefix): v for n, v in arrays.items() if n.startswith(prefix)}))
        return cls(family, Figures(**plain["figures"]), bool(plain["batched"]), Metric(**plain["metric"]),
                   [Figures(**f) for f in plain["sources"]], experts,
                   {size: float(plain["spreads"][size.value]) for size in Size}, float(plain["limits"][0]),
                   float(plain["limits"][1]))


def spread(errors: Sequence[Float64], *, elsewhere: bool = False) -> float:
    """Half-width that holds 80% of the errors [devices][n], each device counting alike.

    Args:
        errors: of calls that took no part in the fit.
        elsewhere: the width is for devices that the errors are not of. Errors of one device are alike, so that 80% of
            the others' hold less than 80% of its own: the share is raised until widths from the others hold 80% of
            each device's calls in the mean (conformal prediction with devices as groups).
    """
    found: list[Float64] = [np.sort(np.abs(e)) for e in errors if len(e)]
    if not found:
        return _LEAST_HALF_WIDTH
    shares: Float64 = np.full(1, _INTERVAL)
    if elsewhere and len(found) > 2:
        shares = np.asarray(np.linspace(_INTERVAL, 0.995, 40), np.float64)
        held = [np.searchsorted(one, _quantiles(found[:i] + found[i + 1:], shares), "right") / len(one)
                for i, one in enumerate(found)]
        enough = int(np.argmax(np.append(np.mean(held, axis=0)[:-1] >= _INTERVAL, True)))
        shares = shares[enough:enough + 1]
    return float(max(_quantiles(found, shares)[0], _LEAST_HALF_WIDTH))


def _quantiles(errors: Sequence[Float64], shares: Float64) -> Float64:
    """Values below which these shares of the errors lie, each device counting alike, [shares]."""
    size = np.concatenate(errors)
    weight = np.concatenate([np.full(len(e), 1 / (len(e) * len(errors))) for e in errors])
    order = np.argsort(size)
    place = np.searchsorted(np.cumsum(weight[order]), shares - 1e-9)
    return np.asarray(size[order][np.minimum(place, len(size) - 1)])
