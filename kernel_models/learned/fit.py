"""Fitting boosted models to samples: features, cross-validation by shape group, and intervals."""

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
from kernel_models.learned.features import RECIPES, Columns, Figures, Variants, gemm_baseline_us, recipe_of
from kernel_models.learned.neighbours import Neighbours
from kernel_models.op_call import Family
from kernel_models.threads import in_threads
from tracer.arrays import Bool, Float64, Int64

FOLDS = 5
"""Folds of cross-validation: the usual number."""
_WEIGHTS = np.arange(11) / 10
"""Possible weights of the second of two members in their mean."""
_AS_GOOD = 0.005
"""Among weights whose errors on rows left out differ by at most this share, the weight nearest to 1/2 is taken: chosen,
below the differences of folds."""


class OutOfFold(NamedTuple):
    """Predictions of rows by trees that were not fitted to them.

    Attributes:
        time_us: Predicted time of each row, µs [n]; NaN for rows of folds that were not predicted.
        done: Whether a row was predicted, [n].
        members: The settings' members, with the share of the trees that helped, and their weights.
    """

    time_us: Float64
    done: Bool
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Problem:
    """Samples as numbers for a fit.

    Attributes:
        columns, figures, variants: input of recipes.
        features: features of the recipe, [n, f].
        baseline_us: times of the recipe's baseline, µs [n].
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
        """Return the problem of samples on a device."""
        family = samples.family
        recipe = RECIPES[recipe_of(family)]
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
        """Return the measured times, [n] µs."""
        return self.baseline_us * np.exp(self.target)

    def out_of_fold(self, how: Boosting, folds: int = FOLDS) -> OutOfFold:
        """Predict each row by trees that saw no row of its fold, grown as long as they help these rows.

        With fewer ``folds`` than all, rows of the other folds are not predicted and always in the fit.
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
        """Return for each member the share of its trees that helps the rows ``out``, and its predictions of them."""
        near = self._neighbours(how, ~out)
        return stop_early(self._seen(near, ~out), self.target[~out], how, self._seen(near, out), self.target[out],
                          plain=self.features.shape[1])

    def model(self, how: Boosting, intervals: Intervals) -> BoostedModel:
        """Return the model fitted to all rows."""
        every = np.ones(len(self.target), bool)
        near = self._neighbours(how, every)
        trees = fit_trees(self._seen(near, every), self.target, how, plain=self.features.shape[1])
        return BoostedModel(self.family, recipe_of(self.family), self.variants, self.figures,
                            limits_of(self.columns, len(self.variants.known)), trees, intervals, near)

    def _neighbours(self, how: Boosting, rows: Bool) -> Neighbours | None:
        """Return some rows as neighbours if the trees use neighbours, else ``None``."""
        if not how.neighbours or self.family is not Family.GEMM:
            return None
        return Neighbours.of(self.columns.taken(rows), self.target[rows], self.baseline_us[rows])

    def _seen(self, near: Neighbours | None, rows: Bool) -> npt.NDArray[np.float32]:
        """Return the features of some rows, those of neighbours included."""
        if near is None:
            return self.features[rows]
        return np.hstack([self.features[rows], near.features(self.columns.taken(rows), self._baseline)])

    def _baseline(self, columns: Columns) -> Float64:
        return gemm_baseline_us(columns, self.figures)


def _weights(predicted: Float64, target: Float64) -> Float64:
    """Return the members' weights whose mean is nearest to the target; ``predicted`` is [members, n]."""
    if len(predicted) != 2 or not len(target):
        return np.ones(len(predicted)) / len(predicted)
    errors = np.array([np.abs((1 - weight) * predicted[0] + weight * predicted[1] - target).mean()
                       for weight in _WEIGHTS])
    good = _WEIGHTS[errors <= errors.min() * (1 + _AS_GOOD)]
    weight = float(good[np.argmin(np.abs(good - 0.5))])
    return np.array([1 - weight, weight])
