"""Torch's own lines on stderr at the borders of a profile, which tell a user nothing, are left out."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_NOISE = re.compile(
    rb"USDT:.*profiler_(?:start|stop)"
    rb"|.*execution_trace_observer\.cpp:\d+\] (?:En|Dis)abling Execution Trace Observer"
    rb"|ERROR:.*DeviceProperties\.cpp:\d+\] gpuGetDeviceCount failed")  # on a machine without a GPU


class QuietStderr:
    """Holds back what is written to file descriptor 2 while ``quiet`` runs, then writes it without the noise.

    Nothing is held back where the system has no files in memory, or no stderr is open.
    """

    def __init__(self) -> None:
        self._held = -1
        if hasattr(os, "memfd_create"):
            with suppress(OSError):
                self._held = os.memfd_create("foretrace")

    def close(self) -> None:
        """Give the memory back. Safe to repeat."""
        held, self._held = self._held, -1
        if held >= 0:
            os.close(held)

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Around a call that makes noise. Two system calls before it, so that it may stand within a profile."""
        try:
            real = os.dup(2) if self._held >= 0 else -1
        except OSError:
            real = -1
        if real < 0:
            yield
            return
        os.dup2(self._held, 2)
        try:
            yield
        finally:
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.flush()
            os.dup2(real, 2)
            os.close(real)
            self._pass_on()

    def _pass_on(self) -> None:
        with suppress(OSError):
            size = os.lseek(self._held, 0, os.SEEK_CUR)
            if not size:
                return
            text = os.pread(self._held, size, 0)
            os.lseek(self._held, 0, os.SEEK_SET)
            os.ftruncate(self._held, 0)
            kept = b"".join(line for line in text.splitlines(keepends=True) if not _NOISE.match(line))
            if kept:
                os.write(2, kept)
