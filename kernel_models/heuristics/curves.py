"""Curves of time over bytes. Each is continuous, never falls as bytes grow, and starts at no time for no bytes."""

from __future__ import annotations

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.sustained import bandwidth_gbps
from tracer.arrays import Float64

L2_SPEEDUP = 1.5
"""Bandwidth of a last-level cache over that of the memory behind it.

Chosen among 1.5, 2.5 and 4, with ``L2_USABLE`` among 0.2 to 0.7, as what errs least on vLLM's element-wise kernels on
A100, A40 and H100 (Vidur) and PyTorch's on H100 (TraceLens' video model).
"""
L2_USABLE = 0.5
"""Share of the last-level cache that holds a kernel's data: it is split in partitions and shared with older data.
Chosen with ``L2_SPEEDUP``."""
GB_PER_S_IN_BYTES_PER_US = 1e3
SHARPNESS = 4.0
"""Power of the norm in which arithmetic and traffic of a kernel overlap (``overlapped``)."""


def usable_cache_bytes(device: DeviceSpec) -> float:
    """Bytes that a kernel finds again in the last-level cache."""
    return L2_USABLE * max(device.l2_mb, device.l3_mb) * 2**20


def memory_us(moved_bytes: Float64, device: DeviceSpec) -> Float64:
    """Time to move bytes at the bandwidth of long copies, with what fits in the last-level cache moving faster, µs.

    With c = usable cache and h = min(1, c/bytes)² the share that still hits (a stream longer than the cache evicts
    itself, so hits fall faster than c/bytes):  t = bytes · (h/(s·B) + (1 − h)/B). Its slope is at least 1/(s·B).
    Source: cache-residency roofline (Ilic et al., "Cache-aware Roofline model", 2014) with a measured speed-up s.
    """
    bandwidth = bandwidth_gbps(device) * GB_PER_S_IN_BYTES_PER_US
    cache = usable_cache_bytes(device)
    hit = np.minimum(1.0, cache / np.maximum(moved_bytes, 1.0)) ** 2
    return moved_bytes / bandwidth * (hit / L2_SPEEDUP + (1.0 - hit))


def link_us(moved_bytes: Float64, bandwidth_gbps: float, half_speed_bytes: float) -> Float64:
    """Time over a link whose speed grows with the size of a copy, µs:  t = (bytes + b½·bytes/(bytes + b½)) / B.

    A copy of b½ bytes reaches two thirds of the link, larger ones all of it; continuous and increasing.
    Source: the latency–bandwidth form of Hockney (1994), with its latency saturating instead of constant so that small
    copies keep the fixed cost that is counted elsewhere.
    """
    b = np.maximum(moved_bytes, 0.0)
    return (b + half_speed_bytes * b / (b + half_speed_bytes)) / (bandwidth_gbps * GB_PER_S_IN_BYTES_PER_US)


def sector_bytes(pieces: Float64, piece_bytes: Float64, sector: float) -> Float64:
    """Bytes that pieces scattered over memory cost: each its own bytes and, on average, a sector's unused rest.

    A piece of p bytes at an arbitrary place touches p/sector + 1 sectors on average, never less than one; aligned
    rows of whole sectors cost themselves. Whole sectors, p + (sector − p mod sector), would jump between these;
    p + sector·exp(−p/sector) does not.
    Source: 32-byte sectors of NVIDIA GPUs (CUDA C++ Best Practices Guide, "Coalesced Access").
    """
    return pieces * (piece_bytes + sector * np.exp(-piece_bytes / sector))


def overlapped(first_us: Float64, second_us: Float64, sharpness: float = SHARPNESS) -> Float64:
    """Time of two kinds of work that overlap, µs: the p-norm, near the longer one and at most 2^(1/p) times it.

    ``sharpness`` p = ∞ would be the roofline's max (Williams et al., 2009); real kernels overlap a little less.
    """
    longest = np.maximum(np.maximum(first_us, second_us), 1e-12)
    return longest * ((first_us / longest) ** sharpness + (second_us / longest) ** sharpness) ** (1.0 / sharpness)
