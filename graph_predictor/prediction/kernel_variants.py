"""Times of a step's kernels in variants of it: drawn together, or one group of kernels alone at an end of its interval.

::

    columns      expected  low  high           variants     group 0 low | group 0 high | group 1 low | … | as expected
    kernel of 0     5       4    7                               4             7              5              5
    kernel of 1     3       2    4                               3             3              2              3

Where groups are taken alone, whatever follows from a kernel's time is worked out of three columns, not of all variants.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from tracer.arrays import Float64, Int64

EXPECTED, LOW, HIGH = range(3)
"""Columns of times where groups are taken alone."""

Number = TypeVar("Number", Int64, Float64)


@dataclass(frozen=True)
class FamilyRows:
    """The rows of each family: found once for all times of the same kernels.

    Attributes:
        family: of each kernel.
        rows: by family.
    """

    family: Int64
    rows: dict[int, Int64]

    @classmethod
    def of(cls, family: Int64) -> FamilyRows:
        """Find them of the family of each kernel."""
        return cls(family, {each: np.flatnonzero(family == each) for each in np.unique(family).tolist()})

    def with_weight(self, weight: Float64) -> list[int]:
        """Return the families of which any kernel has a weight above zero."""
        found = np.zeros(int(self.family.max(initial=-1)) + 1, np.bool_)
        found[self.family[weight > 0]] = True
        return np.flatnonzero(found).tolist()

    def groups(self, groups: list[list[int]]) -> Int64:
        """Return the number of the group that each kernel's family is in; -1 for none."""
        found: Int64 = np.full(len(self.family), -1, np.int64)
        for number, families in enumerate(groups):
            for family in families:
                found[self.rows[family]] = number
        return found


@dataclass(frozen=True)
class GroupEnds:
    """Variants in which each group of kernels alone is at both ends, and two more as expected.

    Attributes:
        group: of each kernel; -1 where it is as expected in all.
        count: the number of groups.
    """

    group: Int64
    count: int

    def over(self, columns: Number, kernel: Int64 | None = None, width: int = 0) -> Number:
        """Return the variants of rows whose columns are known.

        Args:
            columns: of the rows, [rows, 3].
            kernel: the kernel of each row; all in turn by default.
            width: as many variants at least; those more are as expected.
        """
        group = self.group if kernel is None else self.group[kernel]
        rows = np.flatnonzero(group >= 0)
        found = np.empty((len(columns), max(2 * self.count + 2, width)), columns.dtype)
        found[:] = columns[:, EXPECTED, None]
        flat, place = found.ravel(), rows * found.shape[1] + 2 * group[rows]
        flat[place], flat[place + 1] = columns[:, LOW][rows], columns[:, HIGH][rows]
        return found


@dataclass(frozen=True)
class KernelVariants:
    """Times of the kernels of a cycle in variants.

    Attributes:
        ns: of each kernel, [kernels, columns].
        ends: the variants that the columns are of; by default each column is one.
    """

    ns: Float64
    ends: GroupEnds | None = None

    def over(self, columns: Number, kernel: Int64 | None = None, width: int = 0) -> Number:
        """Return the variants of rows that follow from the kernels' times, see ``GroupEnds.over``."""
        return columns if self.ends is None else self.ends.over(columns, kernel, width)
