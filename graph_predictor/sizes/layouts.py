"""``Layout``: how the dimensions of one tensor follow the named sizes, and the effect of reshaping on it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

Shape = tuple[int, ...]


class Dim(NamedTuple):
    """One dimension: ``fixed`` elements stay, the rest grows with the product of the named sizes to these powers.

    A batch of 16 × 64 tokens with one token before each is ``(16, 65)``, its second dimension ``Dim((0, 1), 1)``. A
    ``rounded`` dimension is a share of another (after strides, or rows of an expert) and is rounded to be whole.
    """

    powers: tuple[int, ...]
    fixed: int | Fraction = 0
    rounded: bool = False

    @property
    def follows(self) -> bool:
        """Return whether the dimension changes with any size."""
        return any(self.powers)


Layout = tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class NamedSizes:
    """The named sizes of a step, before and after, and which of them counts samples.

    Attributes:
        old, new: the sizes of each name.
        leading: whether the name is a batch, whose samples a tensor has in at most one dimension.
        derived: by size, dimensions that follow a name although their size differs from the name's. The size identifies
            them in other tensors.
    """

    old: tuple[int, ...]
    new: tuple[int, ...]
    leading: tuple[bool, ...]
    derived: dict[int, Dim] = field(default_factory=dict, compare=False)

    @property
    def constant(self) -> Dim:
        """Return a dimension that follows no name."""
        return Dim((0,) * len(self.old))

    def following(self, name: int) -> Dim:
        """Return a dimension that follows one of the names."""
        return Dim(tuple(int(one == name) for one in range(len(self.old))))

    def constants(self, shape: Shape) -> Layout:
        """Return the layout of a tensor that does not change."""
        return (self.constant,) * len(shape)

    def factor(self, powers: Sequence[int]) -> Fraction:
        """Return the factor by which the product of the named sizes to these powers grows."""
        found = Fraction(1)
        for power, old, new in zip(powers, self.old, self.new, strict=True):
            found *= Fraction(new, old) ** power
        return found

    def resized(self, size: int, dim: Dim) -> int:
        """Return a dimension's new size; the old size if the new one would be negative or not whole."""
        scaled = (size - dim.fixed) * self.factor(dim.powers) + dim.fixed
        if dim.rounded and dim.follows:
            return max(math.floor(scaled + Fraction(1, 2)), 1)
        return int(scaled) if dim.follows and scaled.denominator == 1 and scaled >= 0 else size

    def shape(self, shape: Shape, layout: Layout) -> Shape:
        """Return a tensor's new shape."""
        return tuple(self.resized(size, dim) for size, dim in zip(shape, layout, strict=True))

    def samples(self, layout: Layout) -> int:
        """Return the number of times that a tensor holds the samples: the largest power of a batch in its elements."""
        return max((sum(dim.powers[name] for dim in layout) for name, leads in enumerate(self.leading) if leads),
                   default=0)


def total(layout: Layout) -> tuple[int, ...]:
    """Return the powers of the named sizes in a tensor's number of elements."""
    return tuple(map(sum, zip(*(dim.powers for dim in layout), strict=True)))


def reshaped(sizes: NamedSizes, shape: Shape, layout: Layout, target: Shape) -> Layout | None:
    """Return the layout of the same elements in another shape; ``None`` where the sizes do not determine it.

    Dimensions are grouped from the left until old and new groups hold equally many elements. A size that an old group
    follows goes to the new dimension that equals an old one of these, equals the named size, or is a multiple of it.
    """
    found: list[Dim] = []
    i = j = 0
    while i < len(shape) or j < len(target):
        left, right = [*range(i, min(i + 1, len(shape)))], [*range(j, min(j + 1, len(target)))]
        a, b = _product(shape, left), _product(target, right)
        while a != b:
            if a < b and left and left[-1] + 1 < len(shape):
                left.append(left[-1] + 1)
                a *= shape[left[-1]]
            elif right and right[-1] + 1 < len(target):
                right.append(right[-1] + 1)
                b *= target[right[-1]]
            else:
                return None
        if a == 0:
            return None
        group = _spread(sizes, [(shape[at], layout[at]) for at in left], [target[at] for at in right])
        if group is None:
            return None
        found += group
        i, j = i + len(left), j + len(right)
    return tuple(found)


def _product(shape: Shape, places: list[int]) -> int:
    found = 1
    for at in places:
        found *= shape[at]
    return found


def _spread(sizes: NamedSizes, before: list[tuple[int, Dim]], after: list[int]) -> list[Dim] | None:
    """Return dimensions of the sizes ``after`` that hold the elements of ``before``; ``None`` if this is unclear."""
    following = [(size, dim) for size, dim in before if dim.follows]
    found = [sizes.constant] * len(after)
    if not following:
        return found
    wide = [at for at, size in enumerate(after) if size != 1]
    if len(following) == 1 and following[0][1].fixed:
        size, dim = following[0]
        same = [at for at, one in enumerate(after) if one == size]
        if len(wide) == 1:
            found[wide[0]] = Dim(dim.powers, dim.fixed * (after[wide[0]] // size), dim.rounded)
        elif same:
            found[same[0]] = dim
        elif parts := [at for at, one in enumerate(after) if one in sizes.derived]:
            found[parts[0]] = Dim(dim.powers, Fraction(dim.fixed * after[parts[0]], size), dim.rounded)
        else:
            return None
        return found
    if not after:
        return None
    if any(dim.fixed for _, dim in following):
        if len(wide) != 1:
            return None
        found[wide[0]] = _together(sizes, before, after[wide[0]])
        return found
    for name, power in enumerate(total(tuple(dim for _, dim in following))):
        if power:
            own = {size for size, dim in following if dim.powers[name]}
            at = _home(after, found, own | sizes.derived.keys(), sizes.old[name])
            found[at] = Dim(tuple(p + power * (n == name) for n, p in enumerate(found[at].powers)), 0,
                            found[at].rounded or any(dim.rounded for _, dim in following if dim.powers[name]))
    return found


def _together(sizes: NamedSizes, parts: list[tuple[int, Dim]], size: int) -> Dim:
    """Merge several dimensions with fixed elements; the new size is the product of their new sizes."""
    powers = total(tuple(dim for _, dim in parts))
    factor, new = sizes.factor(powers), math.prod(sizes.resized(one, dim) for one, dim in parts)
    return Dim(powers, Fraction(size * factor - new) / (factor - 1) if factor != 1 else 0, True)


def _home(after: list[int], taken: list[Dim], own: set[int], old: int) -> int:
    """Return the new dimension that a name's growth goes to: the first of those that fit best."""
    def rank(at: int) -> tuple[bool, bool, bool, bool, int]:
        size = after[at]
        return (size not in own, size != old, bool(size % old) or size == 1, taken[at].follows, at)
    return min(range(len(after)), key=rank)
