"""Whether what a step holds fits a device's memory.

What the framework's allocator hands out is known to some per cent; what else is taken of the device is assumed, so that
whether a step fits is a judgement (``Fit``): it is refused only where it cannot fit even with the least of all that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import log
from statistics import NormalDist

from tracer.device_memory import MemoryAccount

CONTEXT = 0.6e9
"""Bytes of a CUDA context with its loaded kernels: an assumption."""
FRAGMENTED = 0.05
"""Share of what comes and goes that the allocator holds and cannot use: an assumption; up to three times as much, none
with expandable segments."""
ERROR = 0.04
"""Share by which what is allocated may be more or less than predicted. Of 41 published peaks above 10 GiB none is
further off than 3.4%; small models, of which logits and workspaces decide, may be by half
(``benchmarks/llm_memory.py``)."""


class Fit(str, Enum):
    """Whether a plan fits a device."""

    FITS = "fits"
    TIGHT = "may not fit"
    """The expected memory is too much, or so near to all there is that usual waste would be too much."""
    NO = "does not fit"


@dataclass(frozen=True, slots=True)
class StageMemory:
    """A rank of a stage at its fullest moment.

    Attributes:
        stage: which, from 0.
        moment: when, such as "loss".
        account: its bytes; ``reserved`` is what is taken beside the allocator's.
        low, high: the same in all, at least and at most.
    """

    stage: int
    moment: str
    account: MemoryAccount
    low: float
    high: float

    @property
    def allocated(self) -> float:
        """Bytes that the framework has handed out: PyTorch's ``max_memory_allocated``."""
        return self.account.allocated


def with_waste(account: MemoryAccount, stage: int = 0, moment: str = "step", communicators: float = 0,
               fragmented: float = FRAGMENTED) -> StageMemory:
    """Return a step's own memory with what is taken beside it: a context, bytes of communicators, and waste, the share
    of which is of what comes and goes."""
    moving, outside = account.activations + account.temporaries, CONTEXT + communicators
    return StageMemory(stage, moment, replace(account, reserved=outside + fragmented * moving),
                       low=account.total * (1 - ERROR) + CONTEXT,
                       high=account.total * (1 + ERROR) + outside + 3 * fragmented * moving)


def fit_probability(memory: StageMemory, limit_bytes: float) -> float:
    """Return the probability that a stage fits a device: the logarithm of its memory taken as normal about what is
    expected, with 80% between its least and its most. One whose memory is unknown (0) has enough."""
    if not limit_bytes > 0:
        return 1.0
    spread = log(memory.high / memory.low) / (2 * NormalDist().inv_cdf(0.9))
    return NormalDist(log(memory.account.total), spread).cdf(log(limit_bytes))


def fit_of(memory: StageMemory, limit_bytes: float) -> Fit:
    """Return whether a stage fits a device; one whose memory is unknown (0) has enough."""
    if not 0 < limit_bytes < memory.high:
        return Fit.FITS
    return Fit.NO if memory.low > limit_bytes else Fit.TIGHT
