"""Bytes alive over a step: every storage, what it holds, and the parts of the peak.

A storage is seen when an operation first returns it and leaves when its last tensor dies (a weak reference says so),
or changes its size (FSDP2 empties and refills the storages of gathered parameters). What an operation allocates and
frees within itself, its workspace, is not seen.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from tracer.device_memory import PEAK, Holds

BLOCK_BYTES = 512
"""CUDA's caching allocator hands out multiples of this."""
_FACTORS = (0.0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0, 2.0, 4.0, 16.0, 64.0)
"""Factors on activations and temporaries that moments are kept for."""


class Storage:
    """One storage. Plain attributes: there are thousands."""

    __slots__ = ("in_forward", "number", "on_device", "reference", "size")

    def __init__(self, number: int, size: int, on_device: bool, in_forward: bool, reference: Any) -> None:
        self.number = number
        self.size = size
        self.on_device = on_device
        self.in_forward = in_forward
        self.reference = reference


class MemoryTracker:
    """Follows storages while a trace runs; ``report`` tells the peak between ``begin`` and ``end``."""

    def __init__(self) -> None:
        self.in_backward = False
        """Whether the recorded step has reached its backward pass; set by the recorder."""
        self.in_optimizer = False
        """Whether an optimizer's step runs; set by the recorder."""
        self.row = -1
        """Row of the operation that was noted last; set by the recorder."""
        self._live: dict[int, Storage] = {}
        self._count = 0
        self._recording = False
        self._start: list[tuple[int, int]] = []
        self._events: list[tuple[int, int]] = []
        self._rows: list[int] = []
        self._forward: set[int] = set()
        self._kept: set[int] = set()
        self._host: set[int] = set()
        self._by_optimizer: set[int] = set()
        self._holds: dict[int, Holds] = {}
        self._first = 0

    def see(self, tensor: Any, *, on_device: bool = True, in_forward: bool = False) -> int:
        """Note a tensor's storage; its number, -1 for a tensor without one."""
        try:
            storage = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):  # sparse
            return -1
        key = storage._cdata
        known = self._live.get(key)
        if known is not None:
            return known.number
        number = self._count
        self._count += 1
        found = Storage(number, storage.nbytes(), on_device, in_forward, weakref.ref(storage, self._gone(key, number)))
        self._live[key] = found
        if not on_device:
            self._host.add(number)
        if self._recording:
            if in_forward:
                self._forward.add(number)
            if self.in_optimizer:
                self._by_optimizer.add(number)
            self._change(number, found.size)
        return number

    def number(self, tensor: Any) -> int:
        """The number of a tensor's storage; -1 if it was never seen."""
        found = self._find(tensor)
        return -1 if found is None else found.number

    def on_device(self, tensor: Any) -> bool | None:
        """Return whether a tensor counts as lying on the device; None if it was never seen."""
        found = self._find(tensor)
        return None if found is None else found.on_device

    def move(self, tensor: Any, on_device: bool) -> None:
        """Let a tensor lie elsewhere without a copy (a model that moves before the step)."""
        number = self.see(tensor, on_device=on_device)
        found = self._find(tensor)
        if found is not None and number >= 0:
            found.on_device = on_device
            (self._host.discard if on_device else self._host.add)(number)

    def device_bytes(self) -> int:
        """Bytes alive on the device now."""
        return sum(storage.size for storage in self._live.values() if storage.on_device)

    def anything_on_device(self) -> bool:
        """Return whether any storage of the recorded step lies on the device."""
        return any(number not in self._host for number, _ in (*self._start, *self._events))

    def resized(self, storage: Any, size: int) -> None:
        """A storage now has ``size`` bytes."""
        found = self._live.get(storage._cdata)
        if found is None or found.size == size:
            return
        if self._recording:
            self._change(found.number, size - found.size)
        found.size = size

    def begin(self) -> None:
        """The recorded step begins."""
        self._start = [(s.number, s.size) for s in self._live.values()]
        self._first = self._count
        self._recording = True

    def backward_begins(self) -> None:
        """Note that backward begins: storages made in forward and still alive were kept for it."""
        self._kept.update(s.number for s in self._live.values() if s.in_forward)

    def end(self) -> None:
        """The recorded step is over."""
        self._recording = False

    def hold(self, tensors: Iterable[Any], what: Holds) -> None:
        """Say what the storages of tensors are for; the first word counts. DTensors stand for their local parts."""
        for tensor in tensors:
            number = self.number(getattr(tensor, "_local_tensor", tensor))
            if number >= 0:
                self._holds.setdefault(number, what)

    def report(self) -> dict[str, int]:
        """Bytes of the recorded step on the device.

        ``peak``: the most that was alive at once; ``peak_blocks`` the same with every storage rounded up to
        ``BLOCK_BYTES`` as CUDA's caching allocator does; ``start`` and ``end``: alive before and after; and for each
        ``Holds`` the bytes at the peak.
        """
        rows, begun = self._on_device()
        if not rows:
            return {}
        numbers, change = np.array(rows, np.int64).T
        total = np.cumsum(change)
        first = max(begun - 1, 0)
        at = first + int(np.argmax(total[first:]))
        blocks = _rounded(numbers, change)
        result = {PEAK: int(total[at]), "peak_blocks": int(np.cumsum(blocks)[first:].max()),
                  "start": int(total[first]) if begun else 0, "end": int(total[-1])}
        parts: dict[Holds, int] = {what: 0 for what in Holds if what is not Holds.RESERVED}
        for number, size in zip(numbers[:at + 1].tolist(), change[:at + 1].tolist(), strict=True):
            parts[self._what(number)] += size
        result.update({what.value: size for what, size in parts.items()})
        return result

    def moments(self) -> list[list[int]]:
        """Moments of the recorded step that may be its peak when its sizes change.

        Of each the bytes on the device that stay as they are (parameters, gradients, optimizer states, …), activations,
        temporaries of forward and backward, and temporaries of the optimizer. For any factors on the last three the
        most that is alive at once is about the largest sum over these moments: they are those that have it for some
        factors from 1/64 to 64, or none.
        """
        rows, begun = self._on_device()
        if not rows:
            return []
        change = np.zeros((len(rows), 4), np.int64)
        for i, (number, size) in enumerate(rows):
            what = self._what(number)
            column = 1 if what is Holds.ACTIVATIONS else 0
            if what is Holds.TEMPORARIES:
                column = 3 if number in self._by_optimizer else 2
            change[i, column] = size
        alive = np.unique(np.cumsum(change, axis=0)[max(begun - 1, 0):], axis=0)
        weights = [(1.0, *each) for each in itertools.product(_FACTORS, _FACTORS, (0.0, 1.0))]
        chosen = sorted({int(np.argmax(alive @ np.array(weight))) for weight in weights})
        found: list[list[int]] = alive[chosen].tolist()
        return found

    def _on_device(self) -> tuple[list[tuple[int, int]], int]:
        """Return storages and changes of their sizes, and how many of them were there when the step began."""
        start = [row for row in self._start if row[0] not in self._host]
        return start + [row for row in self._events if row[0] not in self._host], len(start)

    def _change(self, number: int, size: int) -> None:
        self._events.append((number, size))
        self._rows.append(self.row)

    def changes(self) -> list[tuple[int, int, int, int]]:
        """Return every change on the device, in order: row of the operation (-1: there before the step), the storage's
        number, bytes, and what it holds, as its place in ``Holds``."""
        place = {what: i for i, what in enumerate(Holds)}
        found = [(-1, number, size, place[self._what(number)]) for number, size in self._start
                 if number not in self._host and size]
        found += [(row, number, size, place[self._what(number)]) for (number, size), row in zip(
            self._events, self._rows, strict=True) if number not in self._host and size]
        return found

    def _what(self, number: int) -> Holds:
        if number in self._holds:
            return self._holds[number]
        if number in self._kept:
            return Holds.ACTIVATIONS
        return Holds.OTHER if number < self._first else Holds.TEMPORARIES

    def _find(self, tensor: Any) -> Storage | None:
        with suppress(RuntimeError, NotImplementedError):
            return self._live.get(tensor.untyped_storage()._cdata)
        return None

    def _gone(self, key: int, number: int) -> Callable[[Any], None]:
        def gone(_: Any) -> None:
            found = self._live.get(key)
            if found is not None and found.number == number:
                del self._live[key]
                if self._recording:
                    self._change(number, -found.size)

        return gone


def _rounded(numbers: np.ndarray, change: np.ndarray) -> np.ndarray:
    """The changes of size with each storage rounded up to whole blocks."""
    size: dict[int, int] = {}
    rounded = np.empty_like(change)
    for i, (number, delta) in enumerate(zip(numbers.tolist(), change.tolist(), strict=True)):
        before = size.get(number, 0)
        size[number] = before + delta
        rounded[i] = -(-(before + delta) // BLOCK_BYTES) * BLOCK_BYTES - (-(-before // BLOCK_BYTES) * BLOCK_BYTES)
    return rounded


def resize_watch(tracker: MemoryTracker) -> Callable[[Any, int], Any]:
    """A ``torch.UntypedStorage.resize_`` that tells the tracker."""
    original = torch.UntypedStorage.resize_

    def resize_(self: Any, size: int) -> Any:
        result = original(self, size)
        tracker.resized(self, int(self.nbytes()))
        return result

    return resize_
