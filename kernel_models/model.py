"""The interface of every kernel model: times with intervals and a source for a batch of calls of one family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import numpy as np

from kernel_models.op_call import Family, OpCall
from tracer.arrays import Bool, Float64

Arrays = dict[str, np.ndarray]


class Source(IntEnum):
    """The source of a time, best first."""

    MEASURED = 0
    ANCHORED = 1
    LEARNED = 2
    HEURISTIC = 3
    DATASHEET = 4

    @property
    def label(self) -> str:
        """Lower-case name, as reports and JSON show it."""
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Times:
    """Times of n calls: ``time_us`` the median expected, ``low_us`` to ``high_us`` the 80% interval, all [n] µs.

    ``common`` [n] is the share of an interval's width, as a logarithm, that the calls of a family have in common: sums
    over many calls are no surer than that. ``None``: all of it.
    """

    time_us: Float64
    low_us: Float64
    high_us: Float64
    common: Float64 | None = None


class KernelModel(Protocol):
    """A model of one family on one device (or, with the device's figures as features, on any).

    ``source`` is ``LEARNED`` or ``HEURISTIC`` for fitted ones, ``DATASHEET`` for formulas from specifications only.
    """

    @property
    def family(self) -> Family:
        """The family it prices."""
        ...

    @property
    def source(self) -> Source:
        """Return where its times come from."""
        ...

    def covers(self, calls: Sequence[OpCall]) -> Bool:
        """Return which of the calls lie within what the model was made for (kind, dtype, range of sizes): [n]
        booleans."""
        ...

    def predict(self, calls: Sequence[OpCall]) -> Times:
        """Times of calls of this family; vectorised, no work per call beyond collecting its numbers."""
        ...

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """Return what a profile stores: plain JSON values and plain numeric arrays (never a pickle)."""
        ...


def covered_times(model: KernelModel, calls: Sequence[OpCall]) -> tuple[Bool, Times]:
    """Return which calls a model covers, [n], and the times of those; by the model's own method where it has a quicker
    one."""
    own = getattr(model, "covered_times", None)
    if own is not None:
        found: tuple[Bool, Times] = own(calls)
        return found
    covered = np.asarray(model.covers(calls), np.bool_)
    if not covered.any():
        return covered, Times(np.zeros(0), np.zeros(0), np.zeros(0))
    return covered, model.predict(calls if covered.all() else [calls[i] for i in np.flatnonzero(covered).tolist()])
