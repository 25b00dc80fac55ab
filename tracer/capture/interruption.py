"""Ends from outside that leave what was measured: Ctrl-C, and the SIGTERM of ``kill``, torchrun and job schedulers."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM; unwinds it as Ctrl-C would."""


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Raise ``Terminated`` on SIGTERM, which otherwise ends a process without a word, its captured steps with it.

    A handler of the program's own stays, as does the default outside the main thread, where none can be set.
    """
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is _terminate:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off Ctrl-C and SIGTERM until what is inside is done."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda got, _: came.append(got))
              for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for put_off, handler in before.items():
            signal.signal(put_off, signal.SIG_DFL if handler is None else handler)
    for number in came[:1]:
        signal.raise_signal(number)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated
