"""Fitting boosted models to samples: features, cross-validation by shape group, intervals, and the distilled form."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kernel_models.datasets.samples import Samples, fold_of
from kernel_models.device import DeviceSpec
from kernel_models.learned.boosted import BoostedModel, limits_of
from kernel_models.learned.boosting import Boosting, fit_trees
from kernel_models.learned.columns import Columns, Variants
from kernel_models.learned.features import RECIPES, Figures, recipes_of
from kernel_models.learned.features.gemm import baseline_us
from kernel_models.learned.intervals import Intervals
from kernel_models.learned.neighbours import Neighbours
from kernel_models.learned.trees import Trees
from kernel_models.op_call import Family
from tracer.arrays import Bool, Float64, Int64

FOLDS = 5


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

    def out_of_fold(self, how: Boosting, folds: int = FOLDS) -> tuple[Float64, Bool]:
        """Each row predicted, µs, by trees that saw no row of its fold; which rows were.

        ``folds`` fewer than all leaves the other folds' rows unpredicted, but always in the fit.
        """
        predicted = np.full(len(self.target), np.nan)
        for fold in range(folds):
            out = self.fold == fold
            if not out.any() or out.all():
                continue
            trees, near = self._fitted(how, ~out)
            predicted[out] = trees.predict(self._seen(near, out))
        done = np.isfinite(predicted)
        return self.baseline_us * np.exp(predicted), done

    def model(self, how: Boosting, intervals: Intervals) -> BoostedModel:
        """The model of all rows."""
        trees, near = self._fitted(how, np.ones(len(self.target), bool))
        return BoostedModel(self.family, recipes_of(self.family)[0], self.variants, self.figures,
                            limits_of(self.columns, len(self.variants.known)), trees, intervals, near)

    def _fitted(self, how: Boosting, rows: Bool) -> tuple[Trees, Neighbours | None]:
        """Trees of some rows, and these rows as neighbours if the trees ask for them."""
        near = None
        if how.neighbours and self.family is Family.GEMM:
            near = Neighbours.of(self.columns.taken(rows), self.target[rows], self.baseline_us[rows])
        plain = self.features.shape[1] if near is not None else 0
        return fit_trees(self._seen(near, rows), self.target[rows], how, plain=plain), near

    def _seen(self, near: Neighbours | None, rows: Bool) -> npt.NDArray[np.float32]:
        """Features of some rows."""
        if near is None:
            return self.features[rows]
        return np.hstack([self.features[rows], near.features(self.columns.taken(rows), self._baseline)])

    def _baseline(self, columns: Columns) -> Float64:
        return baseline_us(columns, self.figures)
