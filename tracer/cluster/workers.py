"""``TaskWorkers``: one call for each of many items, with results in order and failures named."""

from __future__ import annotations

import copyreg
import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from tracer.errors import ForetraceError, TraceError

Item = TypeVar("Item")
Result = TypeVar("Result")
Handle = TypeVar("Handle")


def _read_only(mapping: dict[Any, Any]) -> MappingProxyType[Any, Any]:
    return MappingProxyType(mapping)


# A device's figures are in mappings that cannot be changed, which pickle does not know.
copyreg.pickle(MappingProxyType, lambda mapping: (_read_only, (dict(mapping),)))


class ClusterError(ForetraceError):
    """A cluster cannot be used: its engine is unknown, its package is not installed, or nothing answers."""


class LostWorkerError(TraceError):
    """The processes that worked on an item died, twice."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of an item whose call raised a ``ForetraceError``, or whose worker died twice."""

    error: ForetraceError


class TaskWorkers(ABC):
    """Makes one call for each of many items."""

    elsewhere: ClassVar[bool]
    """Whether calls run in other processes, to which functions and items are sent."""

    @abstractmethod
    def map(self, function: Callable[[Item], Result], items: Sequence[Item], *,
            name: Callable[[Item], str] = str) -> Iterator[Result | Failed]:
        """Yield the result of each call, in the order of the items.

        Args:
            function: Called with one item; for calls elsewhere a module's function, or a ``partial`` of one.
            items: Arguments of the calls.
            name: Item → its name in the error about workers that died.

        Raises:
            ClusterError: The cluster is no longer available.
            Exception: Any exception of a call other than a ``ForetraceError``.
        """

    def each(self, function: Callable[[Item], Result], items: Sequence[Item], *,
             name: Callable[[Item], str] = str) -> Iterator[Result]:
        """Yield what ``map`` does, and raise the first failure: its ``ForetraceError``."""
        for found in self.map(function, items, name=name):
            if isinstance(found, Failed):
                raise found.error
            yield found


class ThisProcess(TaskWorkers):
    """Makes each call when its result is requested, one after the other."""

    elsewhere = False

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], *,
            name: Callable[[Item], str] = str) -> Iterator[Result | Failed]:
        """Yield the result of each call, in the order of the items."""
        for item in items:
            yield called(function, item)


class ProcessWorkers(TaskWorkers):
    """Makes the calls in other processes, which may die.

    As many calls run at a time as there are workers. A call whose worker died is repeated once, alone, after all
    others: so a worker that dies cannot lose another call twice.
    """

    elsewhere = True
    size: int
    """Number of worker processes."""

    @abstractmethod
    def answers(self, function: Callable[[Item], Result], items: Sequence[Item], places: Sequence[int],
                at_once: int) -> Iterator[tuple[int, Result | Failed | None]]:
        """Yield (index of an item, the result of ``called``, or ``None`` if its worker died) as calls end.

        Args:
            function: Called with one item.
            items: All items.
            places: Indices of the items to call it with.
            at_once: Largest number of running calls.
        """

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], *,
            name: Callable[[Item], str] = str) -> Iterator[Result | Failed]:
        """Yield the result of each call, in the order of the items."""
        early: dict[int, Result | Failed] = {}
        due = 0
        for place, found in self._in_any_order(function, items, name):
            early[place] = found
            while due in early:
                yield early.pop(due)
                due += 1

    def _in_any_order(self, function: Callable[[Item], Result], items: Sequence[Item], name: Callable[[Item], str]) \
            -> Iterator[tuple[int, Result | Failed]]:
        died = []
        for place, answer in self.answers(function, items, range(len(items)), self.size):
            if answer is None:
                died.append(place)
            else:
                yield place, answer
        for place, answer in self.answers(function, items, died, 1):
            yield place, Failed(LostWorkerError(
                f"{name(items[place])} could not be worked on: two worker processes died over it (killed, or out of "
                "memory); give the workers more memory.",
            )) if answer is None else answer


class ClusterWorkers(ProcessWorkers, Generic[Handle]):
    """Makes the calls on processes of an engine; subclasses send calls and wait for their ends."""

    @abstractmethod
    def submit(self, function: Callable[[Item], bytes], item: Item) -> Handle:
        """Send the call ``function(item)`` to a worker; return its handle."""

    @abstractmethod
    def next_done(self, under_way: Collection[Handle]) -> tuple[Handle, bytes | None]:
        """Wait until one of the calls ends; return it with its result, ``None`` if its worker died."""

    def answers(self, function: Callable[[Item], Result], items: Sequence[Item], places: Sequence[int],
                at_once: int) -> Iterator[tuple[int, Result | Failed | None]]:
        """Yield (index of an item, its answer) as calls end."""
        waiting, under_way = deque(places), dict[Any, int]()
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                place = waiting.popleft()
                under_way[self.submit(PackedCall(function), items[place])] = place
            handle, answer = self.next_done(under_way)
            yield under_way.pop(handle), (
                pickle.loads(answer) if answer is not None else None)  # noqa: S301 -- of trusted workers


@dataclass(frozen=True, slots=True)
class PackedCall(Generic[Item, Result]):
    """A call whose result is returned as bytes, so that this process owns the result's arrays and can write to them."""

    function: Callable[[Item], Result]

    def __call__(self, item: Item) -> bytes:
        """Return the pickled result of the call, or its pickled ``ForetraceError``."""
        return pickle.dumps(called(self.function, item), protocol=5)


def called(function: Callable[[Item], Result], item: Item) -> Result | Failed:
    """Return the result of a call, or its ``ForetraceError``."""
    try:
        return function(item)
    except ForetraceError as error:
        return Failed(error)
