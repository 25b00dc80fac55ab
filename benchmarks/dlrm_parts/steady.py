"""Memory that stays with a process, so that a measurement is of the work and not of the pages it asks for.

glibc gives large blocks back at once and asks for them anew: on this machine a gradient of 120 MB then takes 20–100 ms
instead of 11. Trainers avoid it by such settings too, or by jemalloc.
"""

from __future__ import annotations

import os
import sys

STEADY_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(8 << 30), "MALLOC_TOP_PAD_": str(64 << 20)}
"""Environment of the measured processes."""


def restart_with_steady_memory() -> None:
    """Start this program once more with those settings, unless it has them; they are read when a process starts."""
    if any(os.environ.get(name) != value for name, value in STEADY_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **STEADY_MEMORY})
