"""Fitting boosted models to samples: features, cross-validation by shape group, intervals, and the distilled form."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kernel_models.datasets.samples import Samples, fold_of
from kernel_models.device import DeviceSpec
from kernel_models.learned.boosted import BoostedModel, Intervals, limits_of
from kernel_models.learned.boosting import Boosting, Member, fit_trees, stop_early
from kernel_models.learned.features import RECIPES, Columns, Figures, Variants, gemm_baseline_us, recipes_of
from kernel_models.learned.neighbours import Neighbours
from kernel_models.op_call import DIMENSIONS, Family
from kernel_models.threads import in_threads
from tracer.arrays import Bool, Float64, Int64

FOLDS = 5
"""Of cross-validation: the usual number."""
_WEIGHTS = np.arange(11) / 10
"""Weights that the second of two members may have in their mean."""
_AS_GOOD = 0.005
"""Of weights whose errors on rows left out differ by no more than this share, the one nearest to a half is taken:
chosen, below what folds differ by."""
STUDENT = Boosting(100, 0.25, 127, 0.5, 1, depth=9)
"""Settings of a copy: few trees, many leaves, for 300,000 calls a second (``benchmarks/pricing_speed.py``)."""
ROWS = 50_000
"""Calls a copy learns from at most: chosen, as many as take some seconds."""
LARGE_ROWS = 75_000
"""Most rows for a teacher fitted to more than ``ROWS`` calls: its own calls are enough, and new combinations few."""
_TOGETHER: dict[Family, tuple[tuple[str, ...], ...]] = {
    Family.GEMM: (("batch", "m"), ("n",), ("k",)),
    Family.ATTENTION: (("batch", "q_len", "kv_len"), ("heads", "kv_heads", "head_dim", "v_head_dim", "window")),
}
"""Sizes that are taken from the same measured call; the groups are combined anew. Tables hold each m with each weight,
so that only weights of another n and k are new: they halve what a copy of 22,000 products is worse by."""


class OutOfFold(NamedTuple):
    """Rows as predicted by trees that did not see them.

    Attributes:
        time_us: of each row, [n]; NaN for rows of folds that were not looked at.
        done: rows that were predicted, [n].
        members: the settings' members, with the share of the trees that helped, and their weights.
    """

    time_us: Float64
    done: Bool
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Problem:
    """Samples as numbers to fit to.

    Attributes:
        columns, figures, variants: what recipes take.
        features: of the full recipe, [n, f].
        baseline_us: of the full recipe, [n].
        target: log(measured / baseline), [n].
        fold: cross-validation fold of each row, [n].
    """

    family: Family
    columns: Columns
    figures: Figures
    variants: Variants
    features: npt.NDArray[np.float32]
    baseline_us: Float64
    target: Float64
    fold: Int64

    @classmethod
    def of(cls, samples: Samples, spec: DeviceSpec, grouping: str = "", folds: int = FOLDS) -> Problem:
        """The problem of samples on a device."""
        family = samples.family
        recipe = RECIPES[recipes_of(family)[0]]
        variants = Variants.of(family, samples.calls)
        figures = Figures.of(spec, variants.known)
        columns = variants.columns(samples.calls, work=True)
        features, baseline = recipe.describe(columns, figures)
        labels = samples.labels(grouping)
        chosen = {label: fold_of(label, folds) for label in set(labels)}
        return cls(family, columns, figures, variants, features, baseline, np.log(samples.measured_us / baseline),
                   np.array([chosen[label] for label in labels]))

    @property
    def measured_us(self) -> Float64:
        """The measured times, [n] µs."""
        return self.baseline_us * np.exp(self.target)

    def out_of_fold(self, how: Boosting, folds: int = FOLDS) -> OutOfFold:
        """Predict each row by trees that saw no row of its fold, grown as long as they help these rows.

        ``folds`` fewer than all leaves the other folds' rows unpredicted, but always in the fit.
        """
        outs = [out for fold in range(folds) if (out := self.fold == fold).any() and not out.all()]
        stopped = in_threads([partial(self._stopped, how, out) for out in outs])
        predicted = np.full((len(how.members), len(self.target)), np.nan)
        for out, members in zip(outs, stopped, strict=True):
            predicted[:, out] = [each for _, each in members]
        done = np.isfinite(predicted[0])
        weights = _weights(predicted[:, done], self.target[done])
        shares = np.max([[share for share, _ in members] for members in stopped], axis=0) if outs else np.ones(
            len(how.members))
        return OutOfFold(self.baseline_us * np.exp(weights @ predicted), done, tuple(
            replace(member, share=float(share), weight=float(weight))
            for member, share, weight in zip(how.members, shares, weights, strict=True)))

    def _stopped(self, how: Boosting, out: Bool) -> list[tuple[float, Float64]]:
        """Of each member the share of the trees that helps some rows, which they do not see, and what it predicts."""
        near = self._neighbours(how, ~out)
        return stop_early(self._seen(near, ~out), self.target[~out], how, self._seen(near, out), self.target[out],
                          plain=self.features.shape[1])

    def model(self, how: Boosting, intervals: Intervals) -> BoostedModel:
        """The model of all rows."""
        every = np.ones(len(self.target), bool)
        near = self._neighbours(how, every)
        trees = fit_trees(self._seen(near, every), self.target, how, plain=self.features.shape[1])
        return BoostedModel(self.family, recipes_of(self.family)[0], self.variants, self.figures,
                            limits_of(self.columns, len(self.variants.known)), trees, intervals, near)

    def _neighbours(self, how: Boosting, rows: Bool) -> Neighbours | None:
        """Some rows as neighbours, if the trees ask for them."""
        if not how.neighbours or self.family is not Family.GEMM:
            return None
        return Neighbours.of(self.columns.taken(rows), self.target[rows], self.baseline_us[rows])

    def _seen(self, near: Neighbours | None, rows: Bool) -> npt.NDArray[np.float32]:
        """Features of some rows."""
        if near is None:
            return self.features[rows]
        return np.hstack([self.features[rows], near.features(self.columns.taken(rows), self._baseline)])

    def _baseline(self, columns: Columns) -> Float64:
        return gemm_baseline_us(columns, self.figures)


def _weights(predicted: Float64, target: Float64) -> Float64:
    """Return the members' weights in the mean that is nearest to the target; predicted is [members, n]."""
    if len(predicted) != 2 or not len(target):
        return np.ones(len(predicted)) / len(predicted)
    errors = np.array([np.abs((1 - weight) * predicted[0] + weight * predicted[1] - target).mean()
                       for weight in _WEIGHTS])
    good = _WEIGHTS[errors <= errors.min() * (1 + _AS_GOOD)]
    weight = float(good[np.argmin(np.abs(good - 0.5))])
    return np.array([1 - weight, weight])


def distil(teacher: BoostedModel, columns: Columns, *, rows: int = ROWS, seed: int = 0) -> BoostedModel:
    """A quick copy of a model.

    Args:
        teacher: the model to copy.
        columns: the calls it was fitted to.
        rows: how many calls to learn from at most; new combinations, as far as there are, fill up what was measured.
        seed: of the combinations.
    """
    if len(columns) > ROWS:
        rows = min(rows, LARGE_ROWS)
    asked = _asked(teacher.family, columns, rows, np.random.default_rng(seed))
    recipe = recipes_of(teacher.family)[1]
    features, baseline = RECIPES[recipe].describe(asked, teacher.figures)
    trees = fit_trees(features, np.log(teacher.times(asked) / baseline), STUDENT)
    return replace(teacher, recipe=recipe, trees=trees, neighbours=None)


def _asked(family: Family, columns: Columns, rows: int, random: np.random.Generator) -> Columns:
    extra = rows - len(columns)
    groups = _TOGETHER.get(family)
    if groups is None or extra <= 0:
        taken = random.permutation(len(columns))[:rows]
        return Columns(columns.dims[taken], columns.code[taken], *(
            part[taken] if len(part) else part for part in (columns.flops, columns.bytes_read, columns.bytes_written)))
    first = random.integers(len(columns), size=extra)
    dims = columns.dims[first]
    for group in groups[1:]:
        # From a call of the same variant, as variants may have sizes of their own.
        other = _partners(columns.code, first, random)
        for name in group:
            at = DIMENSIONS[family].index(name)
            dims[:, at] = columns.dims[other, at]
    dims, code = np.concatenate([columns.dims, dims]), np.concatenate([columns.code, columns.code[first]])
    _, kept = np.unique(np.column_stack([code, dims]), axis=0, return_index=True)
    kept.sort()
    nothing = np.zeros(0)
    return Columns(dims[kept], code[kept], nothing, nothing, nothing)


def _partners(code: np.ndarray, first: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """For each row another one of the same variant."""
    order = np.argsort(code, kind="stable")
    start = np.searchsorted(code[order], code[first], side="left")
    end = np.searchsorted(code[order], code[first], side="right")
    return order[start + (random.random(len(first)) * (end - start)).astype(np.int64)]
