"""Several collectives on one link, and a collective beside computation.

Flows on one link share it evenly (processor sharing, as NCCL's channels and fair queues do): with k of them each runs
at 1/k of its speed. Computation beside a collective loses the units that run NCCL's channels, or memory bandwidth; the
collective loses when both together ask for more bandwidth than the memory has. These are bounds from published figures,
not fits: a trace's own overlapped times are better where there are any.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from kernel_models.collectives.nccl_constants import CHANNELS
from kernel_models.collectives.times import CommTimes
from kernel_models.device import DeviceSpec


def shared_times(alone: CommTimes, latency: CommTimes, count: int) -> CommTimes:
    """Times of ``count`` alike collectives that start together on the same links.

    The links carry ``count`` times the bytes; latencies pass side by side.

    Args:
        alone: One collective's times.
        latency: Of them what it takes without bytes to speak of.
        count: How many.
    """
    factor = count - (count - 1) * np.minimum(latency.time_us / np.maximum(alone.time_us, 1e-9), 1.0)
    return CommTimes(alone.time_us * factor, alone.low_us * factor, alone.high_us * factor, alone.level,
                     alone.algorithm)


@dataclass(frozen=True, slots=True)
class Overlap:
    """Factors on the time of what runs at the same time; 1 is undisturbed."""

    compute_bound: float
    memory_bound: float
    collective: float


def overlap_slowdown(device: DeviceSpec, busbw_gbps: float, memory_share: float = 1.0,
                     channels: int = CHANNELS) -> Overlap:
    """Return how a collective and computation on one GPU slow each other down.

    Args:
        device: The GPU.
        busbw_gbps: Bus bandwidth of the collective, 10⁹ bytes/s. Its memory traffic is twice that: each byte is read,
            and each received byte is written.
        memory_share: Of the memory's bandwidth, what the computation alone would use.
        channels: Thread blocks of the collective; each takes a multiprocessor.
    """
    if device.sm_count <= channels or device.memory_bandwidth_gbps <= 0:
        return Overlap(1.0, 1.0, 1.0)
    taken = min(2.0 * busbw_gbps / device.memory_bandwidth_gbps, 0.9)
    return Overlap(device.sm_count / (device.sm_count - channels), 1.0 / (1.0 - taken), max(1.0, memory_share + taken))
