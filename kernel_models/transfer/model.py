"""``TransferModel``: several GPUs' measurements of one family, made into times on a GPU that was never measured.

Every source GPU gives an expert: formulas in a device's published figures, with constants (and for products a
residual) that this source taught. A prediction for another device asks each expert with that device's figures and
takes the mean of the logarithms, weighted by how near the source is to it (``Metric``). The 80% interval comes from
predicting each source by the others: as wide as those errors for a device as far from the sources as they are from
one another, narrower for a nearer one, down to the error of fitted devices.

    model = TransferModel(Family.SOFTMAX).fit([measured_p100, measured_v100, …])
    times = model.on(device("l4")).predict(calls)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kernel_models.device import DeviceSpec
from kernel_models.model import Arrays, Float64, Source, Times
from kernel_models.op_call import Family, OpCall
from kernel_models.transfer.choices import metric_of, recipe_of
from kernel_models.transfer.figures import Figures, Metric
from kernel_models.transfer.measured import Measured, columns
from kernel_models.transfer.products import ProductExpert
from kernel_models.transfer.rows import RowExpert
from kernel_models.transfer.streaming import StreamingExpert

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


def mixed(metric: Metric, experts: Sequence[Expert], sources: list[Figures], target: Figures, dims: Float64) -> Float64:
    """The experts' times on a device, [n]: geometric mean by weight; an expert without weight is not asked."""
    weights = metric.weights(target, sources)
    weights = np.where(weights > _LEAST_WEIGHT, weights, 0.0)
    total = sum(weight * np.log(expert.time_us(target, dims))
                for weight, expert in zip(weights, experts, strict=True) if weight)
    return np.exp(total / weights.sum())


def leave_one_out(
    recipe: Recipe, metrics: Sequence[Metric], data: Sequence[Measured], *, larger: bool = False
) -> list[list[Float64]]:
    """Errors log(predicted / measured) of large calls when each device in turn is unknown.

    Args:
        recipe, metrics, data: how to fit, how to weight, and one entry a device.
        larger: also leave out sizes: fit to the smaller three quarters and predict sizes above those.

    Returns:
        Errors [metrics][devices][n].
    """
    errors: list[list[Float64]] = [[] for _ in metrics]
    for left in data:
        others = [other for other in data if other is not left]
        tested = recipe.large(left)
        if larger:
            limit = float(np.quantile(recipe.size(left.dims), _SMALLER))
            others = [other.rows(recipe.size(other.dims) <= limit) for other in others]
            tested = tested & (recipe.size(left.dims) > limit)
        sources = [other.figures for other in others]
        large = left.rows(tested)
        logs = np.stack([np.log(expert.time_us(left.figures, large.dims)) for expert in recipe.fit(others)])
        for found, metric in zip(errors, metrics, strict=True):
            found.append(metric.weights(left.figures, sources) @ logs - np.log(large.time_us))
    return errors


@dataclass
class TransferModel:
    """A family's model for any device, fitted on several.

    Args:
        family: elementwise, norm, softmax or GEMM.
        batched: for GEMM, whether it is for batched products (``bmm``) or single ones (``linear``, ``mm``, ``addmm``).
        recipe, metric: how to fit and how to weight sources; by default what leaving out train GPUs chose
            (``kernel_models.transfer.choices``).

    Attributes:
        experts_, sources_: one of each source GPU.
        own_spread_, far_spread_: half-widths of the 80% interval, log time: on sources, and on a left-out source.
        far_: mean distance of a left-out source from its nearest one.
    """

    family: Family
    batched: bool = False
    recipe: Any = None
    metric: Metric | None = None

    def fit(self, data: Sequence[Measured], *, leave_out: Sequence[Float64] | None = None) -> TransferModel:
        """Fit to several devices.

        Args:
            data: measurements, one entry a device; three devices at least.
            leave_out: errors of leaving each out, where they are known already (``leave_one_out``).
        """
        if len(data) < 3:
            raise ValueError(f"A transfer model needs three devices or more; there are {len(data)}.")
        recipe = self.recipe or recipe_of(self.family, self.batched)
        metric = self._metric()
        self.sources_ = [entry.figures for entry in data]
        self.experts_ = list(recipe.fit(data))
        own = []
        for expert, entry in zip(self.experts_, data, strict=True):
            large = entry.rows(recipe.large(entry))
            own.append(np.log(expert.time_us(entry.figures, large.dims) / large.time_us))
        far = leave_out if leave_out is not None else leave_one_out(recipe, [metric], data)[0]
        self.own_spread_, self.far_spread_ = _spread(own), _spread(far)
        self.far_ = float(np.mean([metric.distances(f, [g for g in self.sources_ if g is not f]).min()
                                   for f in self.sources_]))
        return self

    def on(self, device: DeviceSpec | Figures) -> TransferredModel:
        """The model of one device."""
        figures = device if isinstance(device, Figures) else Figures.of(device)
        metric = self._metric()
        nearness = min(1.0, float(metric.distances(figures, self.sources_).min()) / self.far_)
        spread = self.own_spread_ + nearness * max(self.far_spread_ - self.own_spread_, 0.0)
        return TransferredModel(self.family, figures, self.batched, metric, self.sources_, self.experts_, spread)

    def _metric(self) -> Metric:
        return self.metric or metric_of(self.family, self.batched)


@dataclass(frozen=True)
class TransferredModel:
    """A family's model on one device that was never measured, or on a source.

    Attributes:
        family, figures: what it prices, and where.
        batched: for GEMM, whether it prices batched products.
        metric, sources, experts: what it was made from.
        spread: half-width of the 80% interval, log time.
    """

    family: Family
    figures: Figures
    batched: bool
    metric: Metric
    sources: list[Figures]
    experts: list[Any]
    spread: float
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
        return Times(time, time * np.exp(-self.spread), time * np.exp(self.spread))

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
                "spread": self.spread}, arrays

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
                   [Figures(**f) for f in plain["sources"]], experts, float(plain["spread"]))


def _spread(errors: Sequence[Float64]) -> float:
    """Half-width that holds 80% of the errors, each device counting alike."""
    size = np.concatenate([np.abs(e) for e in errors])
    weight = np.concatenate([np.full(len(e), 1 / len(e)) for e in errors if len(e)])
    order = np.argsort(size)
    share = np.cumsum(weight[order]) / weight.sum()
    return float(max(size[order][np.searchsorted(share, _INTERVAL)], _LEAST_HALF_WIDTH))
