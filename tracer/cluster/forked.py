"""Calls in copies of this process: both cores read a job's ranks, and nothing is imported or loaded anew."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Collection
from select import poll
from types import TracebackType
from typing import IO

from tracer.cluster.workers import ClusterWorkers, Item

_SHARED = "/dev/shm"
"""A folder of files that are memory."""


def cores() -> int:
    """Processor cores that calls can be made on at once by forking; 1 where that is not safe.

    It is safe on Linux, in a process whose Python has a single thread: a copy has no other thread, and what another
    one held would stay locked in it.
    """
    if not sys.platform.startswith("linux") or threading.active_count() > 1:
        return 1
    return len(os.sched_getaffinity(0))


class ForkedWorkers(ClusterWorkers[int]):
    """A process for each call, forked from this one; results come back through memory that both share.

    To be used in a ``with`` block, at whose end, also by Ctrl-C, no process of it is left.

    Args:
        size: how many calls are made at once.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._under_way: dict[int, tuple[int, IO[bytes]]] = {}
        """By the end of a pipe that is closed when the process ends: the process, and the file of its answer."""

    def __enter__(self) -> ForkedWorkers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for handle in list(self._under_way):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._under_way[handle][0], signal.SIGKILL)
            self._end(handle)

    @property
    def size(self) -> int:
        """Number of worker processes."""
        return self._size

    def submit(self, function: Callable[[Item], bytes], item: Item) -> int:
        """Make a call in a new process."""
        file = tempfile.TemporaryFile(dir=_SHARED if os.access(_SHARED, os.W_OK) else None)  # noqa: SIM115
        handle, held = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of NumPy's libraries mind no fork
            process = os.fork()
        if process:
            os.close(held)
            self._under_way[handle] = process, file
            return handle
        ended = 1
        try:
            file.write(_answer(function, item))
            file.flush()
            ended = 0
        finally:
            os._exit(ended)  # what is still to be done at the end of the program, the first process does

    def next_done(self, under_way: Collection[int]) -> tuple[int, bytes | None]:
        """Wait until one of the processes has ended; its answer, or ``None`` if it died.

        Raises:
            Exception: what its call raised that is no ``ForetraceError``.
        """
        waiting = poll()
        for handle in under_way:
            waiting.register(handle)
        handle = waiting.poll()[0][0]
        answer = self._end(handle)
        if answer[:1] == _RAISED:
            raise pickle.loads(answer[1:])  # noqa: S301 -- of a copy of this very process
        return handle, answer[1:] or None

    def _end(self, handle: int) -> bytes:
        """Return what a process that has ended wrote; nothing if it died."""
        process, file = self._under_way.pop(handle)
        os.close(handle)
        _, status = os.waitpid(process, 0)
        with file:
            file.seek(0)
            return b"" if status else file.read()


_RAISED, _RETURNED = b"e", b"r"


def _answer(function: Callable[[Item], bytes], item: Item) -> bytes:
    try:
        return _RETURNED + function(item)
    except Exception as error:  # is raised again in the first process
        return _RAISED + pickle.dumps(error)
