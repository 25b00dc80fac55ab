"""Distilling: a few trees on a few cheap features that copy a model's predictions, for searches over many shapes.

The student learns from the teacher's predictions, not from measurements, so it may ask the teacher about shapes nobody
measured: the measured sizes in new combinations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernel_models.learned.boosted import BoostedModel
from kernel_models.learned.boosting import Boosting, fit_trees
from kernel_models.learned.columns import Columns
from kernel_models.learned.features import RECIPES, recipes_of
from kernel_models.op_call import DIMENSIONS, Family

STUDENT = Boosting(iterations=130, learning_rate=0.2, leaves=127, feature_share=0.5, least_rows=1, depth=9)
ROWS = 50_000
"""Calls a copy learns from at most."""
LARGE_ROWS = 75_000
"""Most rows for a teacher fitted to more than ``ROWS`` calls: its own calls are enough, and new combinations few."""
_TOGETHER: dict[Family, tuple[tuple[str, ...], ...]] = {
    Family.GEMM: (("batch", "m"), ("n",), ("k",)),
    Family.ATTENTION: (("batch", "q_len", "kv_len"), ("heads", "kv_heads", "head_dim", "v_head_dim", "window")),
}
"""Sizes that are taken from the same measured call; the groups are combined anew. Tables hold each m with each weight,
so that only weights of another n and k are new: they halve what a copy of 22,000 products is worse by."""


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
