"""Causes of simulated times: the vocabulary shared by the simulator and those who read its result."""

from __future__ import annotations

from enum import IntEnum


class StartCause(IntEnum):
    """The cause of a host item's start."""

    PROGRAM_ORDER = 0
    OTHER_THREAD = 1


class EndCause(IntEnum):
    """The cause of a host item's end."""

    OWN_COST = 0
    KERNEL = 1
    QUEUE = 2
    EXTERNAL = 3


class KernelCause(IntEnum):
    """The cause of a kernel's start."""

    LAUNCH = 0
    STREAM = 1
    EDGE = 2
    EXTERNAL = 3


class Bound(IntEnum):
    """The bound of a microsecond of the step: what it was spent on."""

    HOST = 0
    LAUNCH = 1
    COMPUTE = 2
    MEMORY_COPY = 3
    EXPOSED_COMMUNICATION = 4
    WAITING_FOR_RANK = 5
    DATA_LOADING = 6
    SYNC = 7

    @property
    def label(self) -> str:
        """The name people read."""
        return self.name.lower().replace("_", " ")
