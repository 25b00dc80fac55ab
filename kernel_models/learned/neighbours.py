"""Measured times of products with neighbouring weights: further features of a matrix product next to its own sizes.

Libraries choose kernels by rules that no feature of one shape shows, but similar shapes mostly get one kernel. Features
come from the measured products with as many rows m (or the next smaller and larger m, interpolated by logarithm):

- the next smaller and larger contraction k for the given n. Equal tiles and waves do more or fewer steps, so time is
  affine in k, and is interpolated linearly;
- the next smaller and larger n for the given k, interpolated by logarithm;
- all of them, weighted by their distance in (log n, log k): a mean, and a plane.

Values are logarithms of measured time over baseline. A product's own weight (n, k) is always excluded: weights of the
fit then look like new weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kernel_models.learned.features import Columns
from kernel_models.learned.pricing_loop import describe_products, find_groups
from tracer.arrays import Bool, Float64, Int64

if TYPE_CHECKING:
    from kernel_models.op_call import Arrays

Float32 = npt.NDArray[np.float32]

WIDTH = 14
"""Number of features of a product."""
_ALONG_K = 7
"""Index of the feature that is interpolated along the contraction k."""
_MISSING = -20.0
"""Value of a neighbour that was not measured: far below every logarithm of a share or distance."""
MOST_SITES, MOST_PRODUCTS = 512, 50_000
"""Most weights, and products, that are kept: a call compares all products of its m, and a profile stores them."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """Measured products, sorted by variant, batch and m.

    Attributes:
        head: Variant, batch and m of each group, ascending, [groups, 3].
        start: First product of each group, and the end, [groups + 1].
        site, log_site: N and k, and their logarithms to base 2, [products, 2].
        value: Log(measured / baseline), [products].
        base_us: The baseline, µs [products].
    """

    head: Int64
    start: Int64
    site: Int64
    log_site: Float32
    value: Float32
    base_us: Float32

    @classmethod
    def of(cls, columns: Columns, value: Float64, base_us: Float64) -> Neighbours:
        """Return products whose log(measured / baseline) is known; of very many, some weights picked at random."""
        kept = _some(columns.dims[:, 2:])
        if not kept.all():
            columns, value, base_us = columns.taken(kept), value[kept], base_us[kept]
        batch, m, n, k = columns.dims.T
        order = np.lexsort((k, n, m, batch, columns.code))
        heads = np.stack([columns.code, batch, m], axis=1)[order]
        first = np.flatnonzero(np.r_[True, (heads[1:] != heads[:-1]).any(axis=1)])
        site = np.ascontiguousarray(columns.dims[order][:, 2:], np.int64)
        return cls(np.ascontiguousarray(heads[first], np.int64), np.r_[first, len(order)].astype(np.int64),
                   site, np.log2(site).astype(np.float32), value[order].astype(np.float32),
                   base_us[order].astype(np.float32))

    def features(self, columns: Columns, baseline: Callable[[Columns], Float64]) -> Float32:
        """Return the features of products, [n, ``WIDTH``].

        Args:
            columns: the products.
            baseline: times of products by the baseline's formula, µs.
        """
        low, high, share = self._groups(columns)
        found = self._at(low, columns, baseline)
        between = np.flatnonzero(high != low)
        if len(between):
            chosen = np.zeros(len(columns), bool)
            chosen[between] = True
            above = self._at(high[between], columns.taken(chosen), baseline)
            below, part = found[between], share[between, None].astype(np.float32)
            mixed = below * (1 - part) + above * part
            found[between] = np.where(below == _MISSING, above, np.where(above == _MISSING, below, mixed))
        return found

    def _groups(self, columns: Columns) -> tuple[Int64, Int64, Float64]:
        """Return the groups of the next smaller and larger m (−1: none), and the position of each call between them."""
        batch, m, _, _ = columns.dims.T
        low, high, share = np.empty(len(columns), np.int64), np.empty(len(columns), np.int64), np.zeros(len(columns))
        find_groups(self.head, *map(np.ascontiguousarray, (columns.code, batch, m)), low, high)
        between = high != low
        lesser, larger = self.head[low[between], 2], self.head[high[between], 2]
        share[between] = np.log(m[between] / lesser) / np.log(larger / lesser)
        return low, high, share

    def _at(self, group: Int64, columns: Columns, baseline: Callable[[Columns], Float64]) -> Float32:
        result = np.full((len(group), WIDTH), _MISSING, np.float32)
        dims = columns.dims.copy()
        known = group >= 0
        dims[known, 1] = self.head[group[known], 2]
        base_us = baseline(replace(columns, dims=dims)) if len(group) else np.zeros(0)
        n, k = np.ascontiguousarray(dims[:, 2:].T)
        between_us = np.zeros(len(group))
        describe_products(group, n, k, np.log2(n), np.log2(k), self.start, self.site, self.log_site, self.value,
                          self.base_us * np.exp(self.value, dtype=np.float64), result, between_us)
        known = between_us > 0
        result[known, _ALONG_K] = np.log(between_us[known] / base_us[known])
        return result

    def arrays(self) -> Arrays:
        """Return the model's arrays by name, to be stored."""
        return {"near_head": self.head, "near_start": self.start, "near_site": self.site, "near_value": self.value,
                "near_base": self.base_us}

    @classmethod
    def from_arrays(cls, arrays: Arrays) -> Neighbours | None:
        """Return the neighbours that ``arrays()`` stored; ``None`` where there are none.

        Raises:
            ValueError: the arrays do not fit together.
        """
        if "near_head" not in arrays:
            return None
        head, start, site = (np.ascontiguousarray(arrays[name], np.int64) for name in (
            "near_head", "near_start", "near_site"))
        value, base_us = (np.ascontiguousarray(arrays[name], np.float32) for name in ("near_value", "near_base"))
        products = len(value)
        if (head.ndim != 2 or head.shape[1] != 3 or not len(head) or start.shape != (len(head) + 1,) or start[0] != 0
                or start[-1] != products or (np.diff(start) < 1).any() or site.shape != (products, 2)
                or base_us.shape != (products,) or value.ndim != 1 or (site < 1).any() or (head[:, 2] < 1).any()
                or not (np.isfinite(value).all() and np.isfinite(base_us).all() and (base_us > 0).all())):
            raise ValueError("the neighbours of a model do not fit together")
        return cls(head, start, site, np.log2(site).astype(np.float32), value, base_us)


def _some(site: Int64) -> Bool:
    """Return which products to keep, [products]: all products of some weights, where possible."""
    random = np.random.default_rng(0)
    sites, place = np.unique(site, axis=0, return_inverse=True)
    chosen = np.zeros(len(sites), bool)
    chosen[random.permutation(len(sites))[:MOST_SITES]] = True
    kept = np.asarray(chosen[place.reshape(-1)])
    rows = np.flatnonzero(kept)
    kept[rows[random.permutation(len(rows))[MOST_PRODUCTS:]]] = False
    return kept
