"""Numbers of ranks: believable ones, and classes of ranks that do the same work.

Nothing is allocated by a number that a file merely claims. A thousand data-parallel ranks differ in their numbers only:
one graph stands for all, and the numbers in it (its own, and the ranks of its process groups) are worked out for each
from where they lie on the mesh of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tracer.columns import MOST_RANKS, NONE

Span = tuple[int, int, int]
"""Ranks ``first, first + step, … last``."""


@dataclass(frozen=True)
class RankClass:
    """Ranks that do the same work.

    Attributes:
        ranks: spans (first, last, step), by first; none overlap.
        graph: row of ``Job.graphs``; ``NONE`` where no rank of the class was traced.
    """

    ranks: tuple[Span, ...]
    graph: int = NONE

    def __len__(self) -> int:
        return sum((last - first) // step + 1 for first, last, step in self.ranks)

    def __contains__(self, rank: int) -> bool:
        return any(first <= rank <= last and (rank - first) % step == 0 for first, last, step in self.ranks)

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(rank for first, last, step in self.ranks for rank in range(first, last + 1, step)))

    @property
    def first(self) -> int:
        """The lowest rank."""
        return min(first for first, _, _ in self.ranks)

    def __str__(self) -> str:
        """ "0–63, 128", "1–7 (every 2nd)"."""
        parts = []
        for first, last, step in self.ranks:
            text = str(first) if first == last else f"{first}–{last}"
            ending = {1: "st", 2: "nd", 3: "rd"}.get(step % 10 if step % 100 not in (11, 12, 13) else 0, "th")
            parts.append(text if step == 1 or first == last else f"{text} (every {step}{ending})")
        return ", ".join(parts)


def spans(ranks: Iterable[int]) -> tuple[Span, ...]:
    """Ranks as few spans: runs of one step each, taken greedily from the lowest."""
    rest = sorted(set(ranks))
    found: list[Span] = []
    start = 0
    while start < len(rest):
        end = start + 1
        step = rest[end] - rest[start] if end < len(rest) else 1
        while end < len(rest) and rest[end] - rest[end - 1] == step:
            end += 1
        if end - start == 2 and step > 1:  # two ranks are no pattern
            end -= 1
        found.append((rest[start], rest[end - 1], step if end - start > 1 else 1))
        start = end
    return tuple(found)


def checked_classes(value: object, world_size: int) -> list[tuple[Span, ...]] | None:
    """Classes as JSON has them (lists of [first, last, step]), or ``None`` if they are none of this world."""
    if world_size > MOST_RANKS:
        return None
    try:
        found = [tuple((int(first), int(last), int(step)) for first, last, step in ranks)
                 for ranks in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return None
    if not all(0 <= first <= last < world_size and step > 0 and (last - first) % step == 0
               for ranks in found for first, last, step in ranks):
        return None
    total = sum(len(RankClass(ranks)) for ranks in found)
    if total != world_size or len({rank for ranks in found for rank in RankClass(ranks)}) != total:
        return None
    return found


def groups_like(ranks: Sequence[int], of: int, to: int) -> list[int]:
    """The ranks of the group that is to rank ``to`` what the group ``ranks`` is to rank ``of``.

    Groups along the dimensions of a mesh lie on a lattice: so many ranks, so far apart, in one or more dimensions; the
    other member's group is the one of that shape through it. Any other group is taken to be the same for both.
    """
    shape = lattice(ranks, of)
    return list(ranks) if shape is None else _through(shape, to)


def peers_like(ranks: Sequence[int], of: int, to: int) -> list[int]:
    """The same for those who send to one another: as far from ``to`` as they are from ``of``."""
    return [rank - of + to for rank in ranks]


def lattice(ranks: Sequence[int], of: int) -> tuple[tuple[int, int], ...] | None:
    """(distance, number) of each dimension of the lattice through rank ``of`` that the ranks form; ``None`` if none."""
    rest, shape = list(ranks), []
    while len(rest) > 1:
        step, count = rest[1] - rest[0], 2
        while count < len(rest) and rest[count] - rest[count - 1] == step:
            count += 1
        inner = range(0, count * step, step) if step > 0 else ()
        if step <= 0 or len(rest) % count or any(
                rest[start + place] - rest[start] != offset
                for start in range(0, len(rest), count) for place, offset in enumerate(inner)):
            return None
        shape.append((step, count))
        rest = rest[::count]
    found = tuple(shape)
    return found if ranks and _through(found, of) == list(ranks) else None


def _through(shape: tuple[tuple[int, int], ...], rank: int) -> list[int]:
    base = rank - sum(rank // step % count * step for step, count in shape)
    found = [base]
    for step, count in shape:
        found = [start + place * step for place in range(count) for start in found]
    return sorted(found)


_RANK_IN_NAME = re.compile(r"(?:rank|worker|trainer|node)[-_.]?([0-9]+)", re.IGNORECASE)
_MOST_IN_NAME = 1 << 17
"""A number in a file's name above this is a date, a host or a job, not a rank."""


def rank_in_name(path: str) -> int:
    """Return the rank a file's name gives ("rank3.json", "worker3_step_12…"), ``NONE`` if it gives none."""
    match = _RANK_IN_NAME.search(path.rstrip("/").rsplit("/", 1)[-1])
    return int(match.group(1)) if match and len(match.group(1)) < 9 and int(match.group(1)) < _MOST_IN_NAME else NONE


def missing_of(size: int, covered: Collection[int]) -> list[int]:
    """Return the ranks below ``size`` that are not covered, in order."""
    missing = np.ones(min(size, MOST_RANKS), bool)
    missing[[rank for rank in covered if 0 <= rank < len(missing)]] = False
    found: list[int] = np.flatnonzero(missing).tolist()
    return found
