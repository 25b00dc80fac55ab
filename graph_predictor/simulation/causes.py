"""What decided a simulated time: the vocabulary shared by the simulator and those who read its result."""

from __future__ import annotations

from enum import IntEnum


class StartCause(IntEnum):
    """What decided when a host item could start."""

    PROGRAM_ORDER = 0
    OTHER_THREAD = 1


class EndCause(IntEnum):
    """What decided when a host item ended."""

    OWN_COST = 0
    KERNEL = 1
    QUEUE = 2
    EXTERNAL = 3


class KernelCause(IntEnum):
    """What decided when a kernel started."""

    LAUNCH = 0
    STREAM = 1
    EDGE = 2
    EXTERNAL = 3
