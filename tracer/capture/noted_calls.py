"""The noted collective behind each call of a step that has other calls than the step that was noted.

An occasional collective (the loss, every fifth step) must not cost the groups of all others: calls and notes are
aligned in order, by operator and by size where it is known. A call is identified only if every best alignment agrees.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from tracer.graph import ExecutionGraph
from tracer.kineto.collectives import SAME_SIZE, collective_kind

_MOST_CELLS = 4_000_000
"""Cells of the alignment's table, a second or two; longer steps that differ throughout stay unknown."""
_NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "GenericList", "None", "Bool", "Int", "Double", "String"})


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """A collective call of the profile.

    Attributes:
        operator: its name.
        elements: of all tensors it was given, -1 where that was not recorded.
    """

    operator: str
    elements: int = -1

    def may_be(self, note: dict[str, Any]) -> bool:
        """Return whether the note may describe it."""
        if self.operator != note["op"]:
            return False
        sent, received = note["elements_in"], note["elements_out"]
        if self.elements < 0 or self.elements == sent:
            return True
        # Most are given what they receive too; of lists of lists of tensors nothing is recorded.
        return not _is_in_place(self.operator) and self.elements in (received, sent + received)


@lru_cache(maxsize=256)
def _is_in_place(operator: str) -> bool:
    return collective_kind(operator) in SAME_SIZE


def call_of(graph: ExecutionGraph, row: int, operator: str) -> RecordedCall:
    """Read the call in a row of ``graph.ops``."""
    try:
        shapes, dtypes = (json.loads(graph.string(int(column[row]))) for column in (graph.ops.shapes, graph.ops.dtypes))
        sizes = [size for shape, dtype in zip(shapes, dtypes, strict=True) for size in _sizes(shape, dtype)]
        return RecordedCall(operator, sum(sizes) if sizes else -1)
    except (ValueError, TypeError):
        return RecordedCall(operator)


def _sizes(shape: Any, dtype: str) -> list[int]:
    if dtype.startswith("TensorList"):
        return [math.prod(each) for each in shape]
    return [] if dtype in _NO_TENSOR else [math.prod(shape)]


def notes_of(calls: Sequence[RecordedCall], notes: Sequence[dict[str, Any]]) -> list[dict[str, Any] | None]:
    """Return the note of each call, ``None`` where it has none or it could be either of two that differ."""
    first = _leftmost(calls, notes)
    last = [None if place is None else len(notes) - 1 - place
            for place in reversed(_leftmost(calls[::-1], notes[::-1]))]
    found: list[dict[str, Any] | None] = []
    for one, other in zip(first, last, strict=True):
        agreed = one is not None and other is not None and (one == other or notes[one] == notes[other])
        found.append(notes[one] if agreed and one is not None else None)
    return found


def _leftmost(calls: Sequence[RecordedCall], notes: Sequence[dict[str, Any]]) -> list[int | None]:
    """Return the place of each call's note in the leftmost of the longest alignments."""
    found: list[int | None] = [None] * len(calls)
    begin = 0
    while begin < min(len(calls), len(notes)) and calls[begin].may_be(notes[begin]):
        found[begin] = begin
        begin += 1
    middle, rest = calls[begin:], notes[begin:]
    if not middle or not rest or len(middle) * len(rest) > _MOST_CELLS:
        return found
    # best[i][j]: the most that can be aligned of middle[i:] and rest[j:].
    may = [[call.may_be(note) for note in rest] for call in middle]
    best = np.zeros((len(middle) + 1, len(rest) + 1), np.int32).tolist()
    for i in range(len(middle) - 1, -1, -1):
        row, below, fits = best[i], best[i + 1], may[i]
        for j in range(len(rest) - 1, -1, -1):
            row[j] = below[j + 1] + 1 if fits[j] else max(below[j], row[j + 1])
    i = j = 0
    while i < len(middle) and best[i][j]:
        # The first note that it can have without losing any later call; if there is none, it goes without.
        place = next((k for k in range(j, len(rest)) if may[i][k] and best[i + 1][k + 1] + 1 == best[i][j]), None)
        if place is not None:
            found[begin + i] = begin + place
            j = place + 1
        i += 1
    return found
