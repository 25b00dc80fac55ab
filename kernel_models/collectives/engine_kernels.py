"""All-reduce kernels of serving engines within a node, which read and write the other GPUs' memory.

Two kernels, of which an engine takes the quicker (vLLM's and SGLang's ``custom_all_reduce``, TensorRT-LLM's one-shot
and two-shot):

    one shot    every GPU reads all others' buffers:       t = t₀ + (n − 1)·S / B
    two shots   a share reduced by each, then gathered:    t = 2·t₀ + 2·(n − 1)/n·S / B

with S the payload and B the share ``REACHED`` of what a GPU's links carry one way. From ``custom_all_reduce_h200``
(2, 4 and 8 H200, 256 B to 8 MiB): slopes of one shot from 238 to 308 GB/s, of two from 287 to 340, of 450; least times
in CUDA graphs 2.3 to 4.7 µs. ``benchmarks/serving.py --rows kernels`` has every size.
"""

from __future__ import annotations

import numpy as np

from kernel_models.collectives.call import CollectiveBatch, CollectiveKind, CommTimes, Level
from kernel_models.collectives.topology import Topology
from tracer.arrays import Float64

REACHED = 0.63
"""Share of the links' rate that the kernels reach: the median of the slopes above."""
STEP_US = 0.12
"""What a further GPU adds to the least time: flags of all are waited for. From the same table."""
MOST_BYTES = 8 << 20
"""Payload up to which engines use these kernels (vLLM's and SGLang's buffers; TensorRT-LLM's workspace of 8 GPUs)."""
SPREAD = 0.25
"""Half width, a logarithm, of the 80% interval. Of the table's 144 times in CUDA graphs up to 8 MiB 80% lie within
0.11; other devices, and GPUs that do not arrive together, are assumed to double that."""
LINKED = ("nvswitch", "nvlink-mesh")


def with_engine_kernels(times: CommTimes, batch: CollectiveBatch, on: Topology, least_us: float) -> CommTimes:
    """Return times in which all-reduces within a node take what the engine's kernel does where that is less.

    Args:
        times: by the usual library.
        batch: the collectives.
        on: their cluster; without links between its GPUs nothing changes.
        least_us: of the kernel, on two GPUs.
    """
    ranks = np.asarray(batch.ranks, np.float64)
    custom = kernel_us(np.asarray(batch.payload_bytes, np.float64), ranks, on.node.peer_gbps, least_us)
    can = ((batch.kind == CollectiveKind.ALL_REDUCE) & (batch.payload_bytes <= MOST_BYTES) & (batch.nodes == 1)
           & (ranks > 1) & (custom < times.time_us) & (on.node.link in LINKED))
    found = times.take(np.arange(len(batch)))
    found.time_us[can] = custom[can]
    found.low_us[can], found.high_us[can] = custom[can] * np.exp(-SPREAD), custom[can] * np.exp(SPREAD)
    found.level[can] = int(Level.DATASHEET)
    found.algorithm[can] = -1
    return found


def kernel_us(payload: Float64, ranks: Float64, peer_gbps: float, least_us: float) -> Float64:
    """Return the time of the quicker kernel, µs [n]."""
    rate = peer_gbps * REACHED * 1e3
    start = least_us + STEP_US * (ranks - 2.0)
    one: Float64 = start + (ranks - 1.0) * payload / rate
    two: Float64 = 2.0 * start + 2.0 * (ranks - 1.0) / ranks * payload / rate
    return np.minimum(one, two)
