"""Calls of one family as columns, and ``KernelWork``: what they cost at published rates.

A family adds one function that says so (``work_of``), in its own file of ``families`` or in a file here.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.rates import peak_tflops
from kernel_models.op_call import DIMENSIONS, Family, OpCall
from kernel_models.tensors import itemsize
from tracer.arrays import Float64, Int64

T = TypeVar("T")


class FamilyCalls(list[OpCall]):
    """Calls of one family that are priced on one device after another: their columns are made once."""

    @cached_property
    def table(self) -> CallTable:
        """Their columns."""
        return CallTable.made_of(self[0].family, self)


@dataclass(frozen=True)
class CallTable:
    """Columns of n calls of one family.

    ``groups`` are the distinct (kind, dtype), a kind with its layout after a colon ("add:broadcast", "h2d:pinned");
    ``group`` [n] indexes them: whatever depends on those alone is looked up once a group. ``dims`` [n, d]
    is as ``DIMENSIONS`` names it; bytes and operations are floats.
    """

    calls: Sequence[OpCall]
    family: Family
    dims: Float64
    flops: Float64
    bytes_read: Float64
    bytes_written: Float64
    groups: list[tuple[str, str]]
    group: Int64
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, family: Family, calls: Sequence[OpCall]) -> CallTable:
        """Collect the columns, or return those of ``FamilyCalls``; a call with too few sizes gets ones for the
        missing."""
        if isinstance(calls, FamilyCalls) and calls and calls[0].family is family:
            return calls.table
        return cls.made_of(family, calls)

    @classmethod
    def made_of(cls, family: Family, calls: Sequence[OpCall]) -> CallTable:
        """Collect the columns."""
        n, width = len(calls), len(DIMENSIONS[family])
        rows = [call.dims for call in calls]
        if any(len(row) != width for row in rows):
            rows = [(*row, *(1,) * width)[:width] for row in rows]
        codes: dict[tuple[str, str, str], int] = {}
        if family is Family.TRANSFER:
            # Whether the host's side is pinned decides the speed.
            labels = [next((flag for flag in c.flags if flag in ("pinned", "pageable")), "") for c in calls]
        elif family in (Family.GEMM, Family.CONV):
            labels = [""] * n
        else:
            # Efficiencies tell no channels last apart; corrections do.
            labels = ["" if c.layout == "nhwc" else c.layout for c in calls]
        group = np.fromiter((codes.setdefault((c.kind, label, c.dtype), len(codes))
                             for c, label in zip(calls, labels, strict=True)), np.int64, n)
        return cls(
            calls, family, np.array(rows, np.float64).reshape(n, width),
            np.fromiter((c.flops for c in calls), np.float64, n),
            np.fromiter((c.bytes_read for c in calls), np.float64, n),
            np.fromiter((c.bytes_written for c in calls), np.float64, n),
            [(f"{kind}:{label}" if label else kind, dtype) for kind, label, dtype in codes], group)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def bytes_moved(self) -> Float64:
        """Read and written, bytes [n]."""
        return self.bytes_read + self.bytes_written

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, or what it returned before: of these calls, and of what ``what`` names besides. Nobody may
        change it."""
        if what not in self._kept:
            self._kept[what] = make()
        return self._kept[what]  # type: ignore[no-any-return]

    def dim(self, name: str) -> Float64:
        """One size of every call [n]; zero and negative sizes count as one."""
        return self.once(("dim", name), lambda: np.maximum(self.dims[:, DIMENSIONS[self.family].index(name)], 1.0))

    def flagged(self, flag: str) -> Float64:
        """1 of every call with a flag, 0 of the others [n]."""
        return self.once(("flag", flag), lambda: np.fromiter(
            (flag in call.flags for call in self.calls), np.float64, len(self)))

    def by_dtype(self, value: Callable[[str], float]) -> Float64:
        """A number of each call's dtype [n]."""
        return np.array([value(dtype) for _, dtype in self.groups], np.float64)[self.group]

    def by_kind(self, value: Callable[[str], float]) -> Float64:
        """A number of each call's kind (with its layout after a colon) [n]."""
        return np.array([value(kind) for kind, _ in self.groups], np.float64)[self.group]

    def item_bytes(self) -> Float64:
        """Bytes of an element of each call's dtype [n]."""
        return self.by_dtype(itemsize)


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Times of n calls at published rates, µs [n]: of the arithmetic and of the memory traffic, which overlap.

    ``kernels`` [n] counts the kernels a call is known to be made of, each of which costs a device's kernel floor.
    """

    compute_us: Float64
    memory_us: Float64
    kernels: Float64


WorkFunction = Callable[[CallTable, DeviceSpec], KernelWork]
WORK: dict[Family, WorkFunction] = {}
HOST_WORK: dict[Family, WorkFunction] = {}
_MODULES = ("products", "attention", "streaming", "embedding", "on_host")


def work_of(*families: Family, on_host: bool = False) -> Callable[[WorkFunction], WorkFunction]:
    """Register the work function of families; ``on_host``: of what a CPU does otherwise than a GPU."""
    def register(function: WorkFunction) -> WorkFunction:
        for family in families:
            (HOST_WORK if on_host else WORK)[family] = function
        return function
    return register


def work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """The work of calls; a family that registered nothing counts by its bytes and operations."""
    _register()
    known = WORK | HOST_WORK if device.vendor == "host" else WORK
    return known.get(table.family, WORK[Family.OTHER])(table, device)


@cache
def _register() -> None:
    """Import the files that register work functions: those here, and those of families that bring their own."""
    for name in _MODULES:
        import_module(f"kernel_models.heuristics.{name}")
    import_module("kernel_models.families").load()


def vector_us(table: CallTable, device: DeviceSpec) -> Float64:
    """Operations over the peak rate of the units that are no matrix units, µs [n].

    Arithmetic in 16 bits and less is done in fp32 by element-wise kernels, whose rate is taken.
    Source: peak rates of the device's data sheet; ATen's ``opmath_type``.
    """
    return table.flops / table.by_dtype(
        lambda d: peak_tflops(device, d if d in ("fp64", "complex128") else "fp32", matrix=False)) / 1e6


def one(table: CallTable) -> Float64:
    """One kernel a call."""
    return np.ones(len(table))
