"""Families whose time is that of moving their bytes: element-wise, normalisation, softmax, copies, transfers, …."""

from __future__ import annotations

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.rates import link_us, memory_us, peak_tflops, sector_bytes
from kernel_models.heuristics.work import CallTable, KernelWork, one, vector_us, work_of
from kernel_models.op_call import Family
from tracer.arrays import Float64

SECTOR_BYTES = 32.0
"""Least that a memory access moves (NVIDIA; AMD's is 64, whose difference the efficiency absorbs)."""
ROWS_PER_UNIT = 2.0
"""Rows that each unit must have at hand for the whole bandwidth: one block works on a row. Set, not measured."""
LONE_ROWS = 8.0
"""Rows' shares of the bandwidth that a single block can ask for: its threads have 64 KB under way, and a load takes
some 0.6 µs. It counts where a step has a row or two, as in decoding for one sequence."""
RADIX_PASS_BITS = 8
"""Bits of the key sorted in one pass over the data (CUB's radix sort: 5 to 8)."""


@work_of(Family.ELEMENTWISE, Family.MEMSET, Family.RANDOM, Family.LOSS, Family.POOLING, Family.INTERPOLATE,
         Family.OPTIMIZER, Family.TRITON, Family.OTHER)
def streaming_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Each byte moved once at the memory's bandwidth, faster where it stays in the cache, µs.

    Source: roofline (Williams et al., 2009); ``rates.memory_us``.
    """
    return KernelWork(vector_us(table, device), memory_us(table.bytes_moved, device), one(table))


@work_of(Family.COPY, Family.CONCAT)
def copy_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Bytes read in runs and written side by side; short runs cost whole sectors, µs (``rates.sector_bytes``)."""
    piece = table.dim("inner") * table.item_bytes()
    pieces = table.bytes_read / np.maximum(piece, 1.0)
    # A transposition through shared memory reads whole sectors too: no run costs more than four times its bytes.
    read = np.minimum(sector_bytes(pieces, piece, SECTOR_BYTES), 4.0 * table.bytes_read)
    return KernelWork(vector_us(table, device), memory_us(read + table.bytes_written, device), one(table))


@work_of(Family.INDEX)
def index_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Pieces gathered from or scattered to anywhere: each costs whole sectors, µs (``rates.sector_bytes``)."""
    piece = table.dim("inner") * table.item_bytes()
    pieces = table.dim("elements") / table.dim("inner")
    extra = np.maximum(sector_bytes(pieces, piece, SECTOR_BYTES) - pieces * piece, 0.0)
    return KernelWork(vector_us(table, device), memory_us(table.bytes_moved + extra, device), one(table))


@work_of(Family.REDUCTION, Family.SOFTMAX)
def reduction_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Bytes at the bandwidth of as many units as the results keep busy, µs.

    A reduction over everything is split over all units; one over rows gives each row to a block or part of one.
    """
    parallel = np.maximum(table.dim("outer"), table.dim("reduced") / 4096.0)
    return KernelWork(
        vector_us(table, device), memory_us(table.bytes_moved, device) * _idle(parallel, device), one(table)
    )


@work_of(Family.NORM)
def norm_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Bytes at the bandwidth of as many units as there are rows or groups for, µs; long groups are split.

    A fused residual addition has each unit ask for two rows at once (flag "add"): twice the bytes in about the time.
    """
    parallel = np.maximum(table.dim("rows"), table.dim("rows") * table.dim("columns") / 16384.0)
    parallel = parallel * np.fromiter((2.0 if "add" in call.flags else 1.0 for call in table.calls), np.float64,
                                      len(table))
    return KernelWork(
        vector_us(table, device), memory_us(table.bytes_moved, device) * _idle(parallel, device), one(table)
    )


@work_of(Family.SORT)
def sort_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """A radix sort's passes over its keys and positions, µs; top-k selects instead, with about two passes' traffic.

    Each pass reads and writes keys and 64-bit positions. Source: Merrill and Grimshaw, "High performance and scalable
    radix sorting" (2011), as in CUB.
    """
    elements = table.dim("rows") * table.dim("columns")
    item = table.item_bytes()
    passes = np.where(table.by_kind(lambda kind: float("topk" in kind)) > 0, 2.0, item * 8.0 / RADIX_PASS_BITS)
    moved = np.maximum(passes * 2.0 * elements * (item + 8.0), table.bytes_moved)
    return KernelWork(vector_us(table, device), memory_us(moved, device), np.minimum(passes, 8.0))


@work_of(Family.RECURRENT)
def recurrent_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Steps one after another: each layer and direction a kernel a step, products at the matrix units' rate, µs.

    Source: cuDNN's recurrent layers (Appleyard et al., 2016): inputs of all steps as one product, hidden ones in turn.
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    kernels = table.dim("sequence") * table.dim("layers") * table.dim("directions")
    return KernelWork(table.flops / peak / 1e6, memory_us(table.bytes_moved, device), kernels)


def _idle(parallel: Float64, device: DeviceSpec) -> Float64:
    """Return how much longer moving bytes takes when only so many blocks do it: 1 from ``ROWS_PER_UNIT`` a unit on."""
    return np.maximum(1.0, device.sm_count * ROWS_PER_UNIT / np.maximum(parallel, LONE_ROWS))


HALF_SPEED_BYTES = 64e3
"""b½ of a link: where a copy reaches two thirds of its speed. Assumed, of the order bandwidthTest shows."""


@work_of(Family.TRANSFER)
def transfer_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Bytes over PCIe or NVLink, or twice over the memory for a copy within the device, µs (``rates.link_us``).

    A copy to a peer uses all of a device's links, as behind a switch.

    Source: one-way link rates of the data sheet; Hockney's latency–bandwidth model.
    """
    moved = np.maximum(table.dim("bytes"), table.bytes_moved / 2.0)
    peer_gbps = device.peer_gbps or device.host_gbps
    within = table.by_kind(lambda kind: float("dtod" in _plain(kind))) > 0
    peer = table.by_kind(lambda kind: float("ptop" in _plain(kind) or "peer" in kind)) > 0
    host = link_us(moved, device.host_gbps, HALF_SPEED_BYTES)
    other = np.where(peer, link_us(moved, peer_gbps, HALF_SPEED_BYTES), memory_us(2.0 * moved, device))
    return KernelWork(np.zeros(len(table)), np.where(within | peer, other, host), one(table))


def _plain(kind: str) -> str:
    """ "d2d", "DtoD", "device_to_device" → "dtod"; "p2p" → "ptop"."""
    kind = kind.lower().split(":")[0]
    return kind.replace("device", "d").replace("host", "h").replace("_", "").replace("2", "to")
