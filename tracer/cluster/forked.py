"""Calls in copies of this process: all cores read a job's ranks, and nothing is imported or loaded again."""

from __future__ import annotations

import contextlib
import io
import mmap
import os
import pickle
import signal
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from select import POLLIN, poll
from types import TracebackType
from typing import Any

import numpy as np

from tracer.cluster.workers import Failed, Item, ProcessWorkers, Result, called
from tracer.columns import is_constant

_PLACE = struct.Struct("=i")
"""An item's index as it is written to a pipe: of an item to work on, or of a finished one."""
_LENGTH = struct.Struct("=q")
_LOAD = Path("/proc/loadavg")
"""File in which Linux reports how many processes run at this moment."""
_MOST_AT_A_TIME = 64
"""Most items in progress at a time: each has an open file."""


def cores() -> int:
    """Return the number of cores on which forked copies can make calls at once; 1 where forking is not safe.

    It is safe on Linux, in a process whose Python has a single thread. A copy has only that thread: locks held by other
    threads would stay locked in it.
    """
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return 1
    return len(os.sched_getaffinity(0))


def idle_cores() -> int:
    """Return how many of the cores that ``cores`` counts are idle now, at least one.

    On busy cores, copies of this process would together end later than one process alone.
    """
    usable = cores()
    if usable == 1:
        return 1
    running = int(_LOAD.read_text(encoding="ascii").split()[3].partition("/")[0])  # this process among them
    return max(min(usable, (os.cpu_count() or 1) - running + 1), 1)


class ForkedWorkers(ProcessWorkers):
    """Processes forked from this one: all take items from one pipe, and each reports on its own pipe.

    Use it in a ``with`` block: none of its processes outlives the block, even after Ctrl-C.

    Args:
        size: number of processes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._process_of: dict[int, int] = {}
        """The process behind each pipe on which finished work is reported."""

    def __enter__(self) -> ForkedWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for pipe in list(self._process_of):
            self._end(pipe)

    def answers(self, function: Callable[[Item], Result], items: Sequence[Item], places: Sequence[int],
                at_once: int) -> Iterator[tuple[int, Result | Failed | None]]:
        """Yield (index of an item, its answer) as calls end; the answer is ``None`` if a process died.

        Raises:
            Exception: any exception of a call other than a ``ForetraceError``.
        """
        for first in range(0, len(places), _MOST_AT_A_TIME):
            some = places[first:first + _MOST_AT_A_TIME]
            files = {place: os.memfd_create("foretrace") for place in some}
            try:
                for place in self._done(function, items, files, at_once):
                    answer = _read(files[place])
                    if isinstance(answer, _Raised):
                        raise answer.error
                    yield place, answer
                    os.close(files.pop(place))
                for place in files:
                    yield place, None
            finally:
                for file in files.values():
                    os.close(file)

    def _done(self, function: Callable[[Item], Result], items: Sequence[Item], files: dict[int, int], at_once: int) -> \
            Iterator[int]:
        """Start processes, and yield the indices of items whose answers have been written."""
        tasks, given = os.pipe()
        os.write(given, b"".join(map(_PLACE.pack, files)))
        os.close(given)
        waiting = poll()
        running = set()
        for _ in range(min(at_once, len(files))):
            running.add(pipe := self._fork(function, items, files, tasks))
            waiting.register(pipe, POLLIN)
        os.close(tasks)
        while running:
            for pipe, _ in waiting.poll():
                if said := os.read(pipe, _PLACE.size):
                    yield _PLACE.unpack(said)[0]
                else:
                    waiting.unregister(pipe)
                    running.remove(pipe)
                    self._end(pipe)

    def _fork(self, function: Callable[[Item], Result], items: Sequence[Item], files: dict[int, int],
              tasks: int) -> int:
        """Start a process; return the pipe on which it reports finished items, which closes when it ends."""
        pipe, said = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking is safe with the threads of NumPy's libraries
            process = os.fork()
        if process:
            os.close(said)
            self._process_of[pipe] = process
            return pipe
        try:
            os.close(pipe)
            while task := os.read(tasks, _PLACE.size):
                [place] = _PLACE.unpack(task)
                try:
                    answer: Any = called(function, items[place])
                except Exception as error:  # raised again in the first process
                    answer = _Raised(error)
                _write(files[place], answer)
                os.write(said, task)
        finally:
            os._exit(0)  # exit handlers are left to the first process

    def _end(self, pipe: int) -> None:
        """End a process and close its pipe, whether it still runs or not."""
        process = self._process_of.pop(pipe)
        os.close(pipe)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)


class _Raised:
    """An exception of a call in a forked process, other than a ``ForetraceError``."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Pickler(pickle.Pickler):
    """Pickles columns that store a single value once in that form; they would be expanded otherwise."""

    def reducer_override(self, value: Any) -> Any:
        """Return how to make a column of a single value again; ``NotImplemented`` for any other object."""
        if isinstance(value, np.ndarray) and value.ndim == 1 and is_constant(value):
            return np.broadcast_to, (value[:1].copy(), value.shape)
        return NotImplemented


def _write(file: int, answer: object) -> None:
    """Write an object, then its arrays, each after its length."""
    arrays: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, protocol=5, buffer_callback=arrays.append).dump(answer)
    parts: list[bytes | memoryview] = [head.getbuffer(), *(array.raw() for array in arrays)]
    with open(file, "wb", closefd=False) as stream:
        for part in parts:
            stream.write(_LENGTH.pack(len(part)))
            stream.write(part)
            stream.write(bytes(-len(part) % _LENGTH.size))


def _read(file: int) -> Any:
    """Read what ``_write`` wrote; arrays lie in the memory of the file, and can be changed."""
    shared = memoryview(mmap.mmap(file, 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE))
    parts, at = [], 0
    while at < len(shared):
        [length] = _LENGTH.unpack_from(shared, at)
        at += _LENGTH.size
        parts.append(shared[at:at + length])
        at += length + -length % _LENGTH.size
    return pickle.loads(parts[0], buffers=parts[1:])  # noqa: S301 -- of a copy of this very process
