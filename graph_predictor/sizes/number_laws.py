"""Laws by which a program's numbers follow from its named sizes, found from captures at several; exact arithmetic.

A dimension of 48 at batch 4 and of 96 at batch 8 is 12·batch; one of 17 at resolution 64 and of 37 at 96 is
resolution²/256 + 1. Laws are tried from the simplest on: constant, proportional to a product of the named sizes (powers
up to two), that and a constant. What fits several laws of one kind with different consequences is ambiguous, and what
fits none has no law: both are refused, never guessed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

HIGHEST_POWER = 2
HIGHEST_DEGREE = 3
"""Limits for one name, and for a product of several: batch × sequence² (attention) is the highest of tensors."""
SMALL_OFFSET = 2
"""A law with a constant is believed where the constant is that small a multiple of what all values are multiples of: a
class token beside patches, sequence − 1. A count that depends on the data passes by chance in few of the cases."""
CLOSE = 1e-6
"""Relative difference of floating-point numbers that counts as none: the profiler prints six digits and more."""

Powers = tuple[int, ...]


class NoLawError(Exception):
    """No law explains a number, or several do; the text is the reason, for the end of a sentence."""


class NumberLaws:
    """The laws of numbers at captured sizes, and their values at a new one.

    Args:
        sizes: of each capture, the same names in each.
        new: the size of each name that is asked for.
    """

    def __init__(self, sizes: Sequence[Mapping[str, int]], new: Mapping[str, int]) -> None:
        self.sizes, self.new = [dict(one) for one in sizes], dict(new)
        self.names = [name for name in new if len({one[name] for one in self.sizes}) > 1]
        powers = [p for p in itertools.product(range(HIGHEST_POWER + 1), repeat=len(self.names))
                  if 1 <= sum(p) <= HIGHEST_DEGREE]
        self._powers = sorted(powers, key=lambda p: (sum(p), p))
        self._known: dict[tuple[int, ...], int | NoLawError] = {}

    def value(self, values: tuple[int, ...]) -> int:
        """The value at the new sizes of a number with these values in the captures. Raises ``NoLawError``."""
        if values not in self._known:
            try:
                self._known[values] = self._solve(values)
            except NoLawError as error:
                self._known[values] = error
        found = self._known[values]
        if isinstance(found, NoLawError):
            raise found
        return found

    def real(self, values: tuple[float, ...]) -> float:
        """The same of floating-point numbers such as 1/(batch·seq); that of the first capture where no law fits."""
        if max(values) - min(values) <= CLOSE * max(map(abs, values)):
            return values[0]
        for powers in self._powers:
            for sign in (-1, 1):
                at = [float(self._product(powers, one)) ** sign for one in self.sizes]
                factors = [v / a for v, a in zip(values, at, strict=True)]
                if max(factors) - min(factors) <= CLOSE * max(map(abs, factors)):
                    return float(factors[0] * float(self._product(powers, self.new)) ** sign)
        return values[0]

    def _product(self, powers: Powers, sizes: Mapping[str, int]) -> int:
        return math.prod(sizes[name] ** power for name, power in zip(self.names, powers, strict=True))

    def _solve(self, values: tuple[int, ...]) -> int:
        if len(set(values)) == 1:
            return values[0]
        found = self._proportional(values) or self._with_constant(values)
        shown = " and ".join(map(str, values))
        if not found:
            raise NoLawError(f"{shown} follow no law in {', '.join(self.names)} (they may depend on the data)")
        if len(set(found)) > 1:
            choices = " or ".join(str(float(one) if one.denominator > 1 else int(one)) for one in sorted(set(found)))
            raise NoLawError(f"{shown} fit several laws, by which it would be {choices}; one more capture, in which "
                             "only one of the names changes, decides")
        if found[0].denominator > 1 or found[0] < min(0, *values):
            raise NoLawError(f"{shown} would become {float(found[0]):g}, which is no size; choose a size that divides "
                             "like the captured ones")
        return int(found[0])

    def _proportional(self, values: tuple[int, ...]) -> list[Fraction]:
        found = []
        for powers in self._powers:
            factors = {Fraction(v, self._product(powers, one)) for v, one in zip(values, self.sizes, strict=True)}
            if len(factors) == 1:
                found.append(factors.pop() * self._product(powers, self.new))
        return found

    def _with_constant(self, values: tuple[int, ...]) -> list[Fraction]:
        """Fit constant + factor × product, and predict by the laws whose constant is least; see ``SMALL_OFFSET``."""
        candidates: list[tuple[int, Fraction]] = []
        for powers in self._powers:
            at = [self._product(powers, one) for one in self.sizes]
            first, other = min(range(len(at)), key=at.__getitem__), max(range(len(at)), key=at.__getitem__)
            if at[first] == at[other]:
                continue
            factor = Fraction(values[other] - values[first], at[other] - at[first])
            constant = values[first] - factor * at[first]
            parts = [factor * one for one in at]
            if any(constant + part != v for part, v in zip(parts, values, strict=True)):
                continue
            if constant.denominator > 1 or any(part.denominator > 1 for part in parts):
                continue
            unit = math.gcd(int(constant), *map(int, parts))
            offset = abs(int(constant)) // unit
            plain = sum(powers) == 1 and factor.denominator == 1 and constant > 0  # a prompt before the text: 64 + seq
            if offset <= SMALL_OFFSET or plain:
                candidates.append((offset, constant + factor * self._product(powers, self.new)))
        least = min((offset for offset, _ in candidates), default=0)
        return [value for offset, value in candidates if offset == least]
