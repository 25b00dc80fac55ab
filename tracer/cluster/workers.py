"""``TaskWorkers``: one call for each of many items, its results in order and its failures named."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from tracer.errors import ForetraceError, TraceError

Item = TypeVar("Item")
Result = TypeVar("Result")
Handle = TypeVar("Handle")


class ClusterError(ForetraceError):
    """A cluster cannot be used: its name is none, its package is not installed, or nothing answers."""


class LostWorkerError(TraceError):
    """The processes that worked on an item died."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The result of an item whose call raised a ``ForetraceError``, or whose worker died twice."""

    error: ForetraceError


class TaskWorkers(ABC):
    """Makes a call for each of many items."""

    elsewhere: ClassVar[bool]
    """Whether calls are made in other processes: functions and items are then sent there."""

    @abstractmethod
    def map(self, function: Callable[[Item], Result], items: Sequence[Item], *,
            name: Callable[[Item], str] = str) -> Iterator[Result | Failed]:
        """Yield the result of each call, in the order of the items.

        Args:
            function: called with one item; for calls elsewhere a function of a module, or a ``partial`` of one.
            items: what it is called with.
            name: what an item is called in the message about a worker that died over it.

        Raises:
            ClusterError: the cluster went away.
            Exception: what a call raised that is no ``ForetraceError``.
        """


class ThisProcess(TaskWorkers):
    """Makes each call when its result is asked for, one after the other."""

    elsewhere = False

    def map(self, function: Callable[[Item], Result], items: Sequence[Item], *,
            name: Callable[[Item], str] = str) -> Iterator[Result | Failed]:
        """Yield the result of each call, in the order of the items."""
        for item in items:
            yield _called(function, item)


class ClusterWorkers(TaskWorkers, Generic[Handle]):
    """Makes the calls on processes of an engine, which says how a call is sent and which one is done.

    As many calls are under way as there are workers. One whose worker died is made once more when all others are done,
    with none beside it: a worker that dies takes no other call along twice.
    """

    elsewhere = True

    @property
    @abstractmethod
    def size(self) -> int:
        """Number of worker processes."""

    @abstractmethod
    def submit(self, function: Callable[[Item], bytes], item: Item) -> Handle:
        """Send a call."""

    @abstractmethod
    def next_done(self, under_way: Collection[Handle]) -> tuple[Handle, bytes | None]:
        """Wait until one of the calls is done; its result, or ``None`` if its worker died."""

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
        for place, answer in self._answers(function, items, range(len(items)), self.size):
            if answer is None:
                died.append(place)
            else:
                yield place, pickle.loads(answer)  # noqa: S301 -- of workers that were trusted with the function
        for place, answer in self._answers(function, items, died, 1):
            yield place, Failed(LostWorkerError(
                f"{name(items[place])} could not be worked on: two worker processes died over it (killed, or out of "
                "memory); give the workers more memory.",
            )) if answer is None else pickle.loads(answer)  # noqa: S301

    def _answers(self, function: Callable[[Item], Result], items: Sequence[Item], places: Iterable[int],
                 at_once: int) -> Iterator[tuple[int, bytes | None]]:
        """Yield (place of an item, what came back) as calls are done, ``at_once`` of them under way."""
        waiting, under_way = deque(places), dict[Any, int]()
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                place = waiting.popleft()
                under_way[self.submit(PackedCall(function), items[place])] = place
            handle, answer = self.next_done(under_way)
            yield under_way.pop(handle), answer


@dataclass(frozen=True, slots=True)
class PackedCall(Generic[Item, Result]):
    """A call whose result comes back as bytes: its arrays are then this process's own, and can be written."""

    function: Callable[[Item], Result]

    def __call__(self, item: Item) -> bytes:
        """Make the call."""
        return pickle.dumps(_called(self.function, item), protocol=5)


def _called(function: Callable[[Item], Result], item: Item) -> Result | Failed:
    try:
        return function(item)
    except ForetraceError as error:
        return Failed(error)
