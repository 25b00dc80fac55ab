"""The processor cores that a process may use, and how it starts another."""

from __future__ import annotations

import os
import sys

RUN_MODULE = (sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), "-m")  # -P: not from here


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
