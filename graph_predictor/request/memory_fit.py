"""Judge whether a step fits a device's memory.

The memory that the framework's allocator hands out is predicted to a few per cent. The rest (contexts, communicators,
waste) is assumed. So the result is a judgement (``Fit``): a step is refused only if even the lowest total does not fit.
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
"""Assumed memory that the allocator holds and cannot use, as a share of activations and temporaries. It may be up to
three times this share; with expandable segments it is zero."""
ERROR = 0.04
"""Relative error of predicted allocated memory. Of 41 published peaks above 10 GiB all are within 3.4%. Small
models, whose peak is logits and workspaces, may be off by half (``benchmarks/llm_memory.py``)."""


class Fit(str, Enum):
    """Whether a plan fits a device."""

    FITS = "fits"
    TIGHT = "may not fit"
    """The expected memory does not fit, or so nearly fills the device that usual waste would not fit."""
    NO = "does not fit"


@dataclass(frozen=True, slots=True)
class StageMemory:
    """Memory of a rank of a pipeline stage at its peak.

    Attributes:
        stage: number of the stage, from 0.
        moment: phase of the peak, such as "loss".
        account: its bytes; ``reserved`` is memory of the device that the allocator has not handed out.
        low, high: ends of the total's 80% interval, bytes.
    """

    stage: int
    moment: str
    account: MemoryAccount
    low: float
    high: float

    @property
    def allocated(self) -> float:
        """Return the bytes that the framework has handed out: PyTorch's ``max_memory_allocated``."""
        return self.account.allocated


def with_waste(account: MemoryAccount, stage: int = 0, moment: str = "step", communicators: float = 0,
               fragmented: float = FRAGMENTED) -> StageMemory:
    """Return a step's own memory plus a context, ``communicators`` bytes of communicators, and waste: ``fragmented`` ×
    the bytes of activations and temporaries."""
    moving, outside = account.activations + account.temporaries, CONTEXT + communicators
    return StageMemory(stage, moment, replace(account, reserved=outside + fragmented * moving),
                       low=account.total * (1 - ERROR) + CONTEXT,
                       high=account.total * (1 + ERROR) + outside + 3 * fragmented * moving)


def fit_probability(memory: StageMemory, limit_bytes: float) -> float:
    """Return the probability that a stage fits a device; 1 on a device of unknown memory (0). The log of the stage's
    memory is taken as normal around the expected value, with 80% between ``low`` and ``high``."""
    if not limit_bytes > 0:
        return 1.0
    spread = log(memory.high / memory.low) / (2 * NormalDist().inv_cdf(0.9))
    return NormalDist(log(memory.account.total), spread).cdf(log(limit_bytes))


def fit_of(memory: StageMemory, limit_bytes: float) -> Fit:
    """Return whether a stage fits a device; on a device of unknown memory (0) it fits."""
    if not 0 < limit_bytes < memory.high:
        return Fit.FITS
    return Fit.NO if memory.low > limit_bytes else Fit.TIGHT
