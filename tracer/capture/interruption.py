"""Interruptions that keep what was measured: Ctrl-C, SIGTERM of ``kill`` and torchrun, SIGHUP of a terminal."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

TERMINATIONS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP asked the process to end; it unwinds the stack as Ctrl-C does."""


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Raise ``Terminated`` on SIGTERM and SIGHUP, which otherwise end a process and lose its captured steps.

    The program's handlers and ``nohup`` stay, and so does the default outside the main thread, where none can be set.
    """
    in_main = threading.current_thread() is threading.main_thread()
    ours = [number for number in TERMINATIONS if in_main and signal.getsignal(number) == signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number in ours:
            if signal.getsignal(number) is _terminate:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C, SIGTERM and SIGHUP until the block has ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = {number: signal.signal(number, lambda got, _: came.append(got))
              for number in (signal.SIGINT, *TERMINATIONS)}
    try:
        yield
    finally:
        for put_off, handler in before.items():
            signal.signal(put_off, signal.SIG_DFL if handler is None else handler)
    for number in came[:1]:
        signal.raise_signal(number)


def _terminate(number: int, frame: FrameType | None) -> None:
    raise Terminated


def end_with_parent() -> None:
    """End this process's own group when its parent ends: standard input, a pipe from the parent, closes then."""
    pipe = os.dup(0)
    with open(os.devnull, "rb") as empty:  # for programs started from here
        os.dup2(empty.fileno(), 0)

    def watch() -> None:
        os.read(pipe, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()
