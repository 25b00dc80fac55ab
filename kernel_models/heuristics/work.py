"""The work of calls of one family, as columns (``KernelWork``), and the published rates that determine its time.

Curves of time over bytes are continuous, never fall as bytes grow, and start at 0 µs for 0 bytes.

A family registers one function for the cost of its calls (``work_of``), in its own file of ``families`` or in a file
here. This file has the families whose time is that of moving their bytes: element-wise, normalisation, softmax, copies,
transfers, ….
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from typing import Any, TypeVar

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.op_call import DIMENSIONS, Family, OpCall, itemsize
from tracer.arrays import Float64, Int64

REACHED_BANDWIDTH = {
    ("pascal", "GDDR5"): 0.755, ("pascal", "HBM2"): 0.76, ("volta", "HBM2"): 0.91, ("turing", "GDDR6"): 0.765,
    ("ampere", "GDDR6"): 0.82, ("ampere", "HBM2"): 0.88, ("ampere", "HBM2e"): 0.87, ("ada", "GDDR6"): 0.78,
    ("rtx-blackwell", "GDDR7"): 0.88, ("cascade-lake", "DDR4"): 0.80, ("alder-lake", "DDR5"): 0.80,
}
"""Share of the published bandwidth that element-wise kernels of a gigabyte and more reach.

Measured: NeuSight's fp32 `add` and `relu` on P4, P100, V100, T4, L4, A100 PCIe 40 and 80 GB; Vidur's `add` on A40.
Assumed: GDDR7 (as NVIDIA's HBM; an RTX 4090's GDDR6X is published to reach 0.91), processors' channels (four fifths).
"""
REACHED_BY_VENDOR = {"nvidia": 0.88, "amd": 0.80, "host": 1.0}
"""Share of the bandwidth for memories without a measurement: NVIDIA's HBM (above; copies on a B300 are published to
reach 0.90), AMD's as BabelStream results on MI250X and MI300X are published, about four fifths of the peak. The host's
bandwidth comes from its calibration."""

WATTS_PER_TFLOPS = {("turing", False): 13.9, ("ada", False): 7.0, ("rtx-blackwell", False): 6.6,
                    ("turing", True): 1.73, ("ada", True): 0.97, ("rtx-blackwell", True): 0.97}
"""Board power for 10¹² operations/s, W, by architecture and whether on matrix units.

Large fp32 products of NeuSight run at 5.0 TFLOP/s on a T4 (70 W) and 10.3 on an L4 (72 W); Ada's matrix units from bf16
products on an L40S, which its 350 W do not slow; Turing's by the ratio of its peaks. RTX Blackwell's fp32 is the best
of cuBLASLt in github.com/xzwgit/gpu-flops-bench: RTX 5090 83 TFLOP/s at 575 W, RTX PRO 6000 84 at 600 W, RTX PRO 5000
52 at 300 W. Its matrix units are assumed to be like Ada's, of the same process. The PRO 5000's 257 TFLOP/s of bf16 at
300 W only limit the figure to 1.17. Other architectures are not limited.
"""


REACHED_MATRIX = {"cdna2": 0.58, "cdna3": 0.58, "cdna4": 0.58}
"""Share of the published matrix rate that large products reach before any kernel's own efficiency.

AMD's matrix units lower their clock under load: large bf16 products on an MI300X run at 0.45 of the peak where NVIDIA's
reach 0.78 (trace `torch-compile-mi300`, TraceLens); CDNA 2 and 4 are assumed to be like it.
"""


_ONE_PASS, _TWO_PASSES, _ATTENTION = 1.0, 1.8, 3.5
SCATTERED = 1.7
"""Factor on ``MOST_FLOORS`` for scattered operands, whose places each element's thread computes. Set, not measured."""
MOST_FLOORS: Mapping[str, Mapping[Family, float]] = {"blackwell": {
    **dict.fromkeys((Family.ELEMENTWISE, Family.COPY, Family.TRITON, Family.MEMSET, Family.RANDOM, Family.POOLING,
                     Family.INTERPOLATE, Family.OPTIMIZER), _ONE_PASS),
    **dict.fromkeys((Family.NORM, Family.SOFTMAX, Family.REDUCTION, Family.CONCAT, Family.INDEX, Family.EMBEDDING,
                     Family.LOSS, Family.OTHER), _TWO_PASSES),
    Family.GEMM: 2.2, Family.ATTENTION: _ATTENTION}}
"""Most kernel floors that a kernel costs before its work, by architecture and family, with the default efficiencies.

Those efficiencies hold multiples of the floor from V100, A100 and tables of long calls. Their times are whole
microseconds or show little of short calls. On a B200 short kernels take a floor or two (trace `vllm-eager-B200`, whose
kinds of kernels ``benchmarks/inference_kernels.py`` prints in two halves). For products, the value is the remainder in
bf16's tables. Other architectures are not limited. On an H100 norms, reductions and softmax of short rows are also
priced at twice their time, but with a limit recorded steps err more the other way.
"""


def most_floors(device: DeviceSpec, family: Family, scattered: bool = False) -> float:
    """Return the longest that a kernel takes before its work, in kernel floors; infinite where no limit is known."""
    most = MOST_FLOORS.get(device.architecture, {}).get(family, float("inf"))
    return SCATTERED * most if scattered else most


_WIDER = {"fp4": "fp8", "fp8": "fp16", "fp16": "fp32", "bf16": "fp32"}


def bandwidth_gbps(device: DeviceSpec) -> float:
    """Return the bandwidth that long copies reach, reads and writes together, 10⁹ bytes/s."""
    reached = REACHED_BANDWIDTH.get((device.architecture, device.memory_kind), REACHED_BY_VENDOR[device.vendor])
    return device.memory_bandwidth_gbps * reached


def computed_as(device: DeviceSpec, dtype: str) -> str:
    """Return the type in which products of an element type are computed on a device.

    Where matrix units lack an 8- or 4-bit type, operands are widened to the next type that the units have. Without
    matrix units for 16-bit types, cuBLAS and rocBLAS multiply them in fp32, as PyTorch asks them to ("compute type" of
    ``cublasGemmEx``). A high rate of fp16 arithmetic does not change that.
    """
    if device.vendor == "host":
        return dtype
    while dtype in _WIDER and dtype not in device.matrix_tflops:
        dtype = _WIDER[dtype]
    return dtype


def peak_tflops(device: DeviceSpec, dtype: str, *, matrix: bool) -> float:
    """Return the published rate, or the rate that the board's power sustains if lower, 10¹² operations/s."""
    if matrix:
        dtype = computed_as(device, dtype)
    peak = device.peak_tflops(dtype, matrix=matrix)
    on_matrix = matrix and device.matrix_tflops.get(dtype) == peak
    watts = WATTS_PER_TFLOPS.get((device.architecture, on_matrix))
    if on_matrix:
        peak *= REACHED_MATRIX.get(device.architecture, 1.0)
    if watts is None or dtype in ("fp64", "complex128"):
        return peak
    # A matrix rate in 8 bits takes the power of half that rate in 16 bits, in 4 bits of a quarter.
    narrow = {"fp8": 2.0, "int8": 2.0, "fp4": 4.0}.get(dtype, 1.0) if on_matrix else 1.0
    return min(peak, narrow * device.power_w / watts)


L2_SPEEDUP = 1.5
"""Bandwidth of a last-level cache over that of the memory behind it.

Chosen among 1.5, 2.5 and 4, with ``L2_USABLE`` among 0.2 to 0.7, for the least error on element-wise kernels. These are
vLLM's on A100, A40 and H100 (Vidur) and PyTorch's on H100 (TraceLens' video model).
"""
L2_USABLE = 0.5
"""Share of the last-level cache that holds a kernel's data: it is split into partitions and shared with older data.
Chosen with ``L2_SPEEDUP``."""
GB_PER_S_IN_BYTES_PER_US = 1e3  # by definition
SHARPNESS = 4.0
"""Power of the norm in which arithmetic and traffic of a kernel overlap (``overlapped``). Set: at most 19% above the
roofline's maximum. Corrections were fitted with it (``step_fit``)."""


def usable_cache_bytes(device: DeviceSpec) -> float:
    """Return the bytes that a kernel finds again in the last-level cache."""
    return L2_USABLE * max(device.l2_mb, device.l3_mb) * 2**20


def memory_us(moved_bytes: Float64, device: DeviceSpec) -> Float64:
    """Return the time to move bytes at the bandwidth of long copies, µs; bytes in the last-level cache move faster.

    t = bytes · (h/(s·B) + (1 − h)/B), with c = usable cache and h = min(1, c/bytes)² the share that still hits. A
    stream longer than the cache evicts itself, so hits fall faster than c/bytes. The slope is at least 1/(s·B). Source:
    cache-residency roofline (Ilic et al., "Cache-aware Roofline model", 2014) with a measured speed-up s.
    """
    bandwidth = bandwidth_gbps(device) * GB_PER_S_IN_BYTES_PER_US
    cache = usable_cache_bytes(device)
    hit = np.minimum(1.0, cache / np.maximum(moved_bytes, 1.0)) ** 2
    return moved_bytes / bandwidth * (hit / L2_SPEEDUP + (1.0 - hit))


def link_us(moved_bytes: Float64, bandwidth_gbps: float, half_speed_bytes: float) -> Float64:
    """Return the time over a link whose speed grows with a copy's size, µs:  t = (bytes + b½·bytes/(bytes + b½)) / B.

    A copy of b½ bytes reaches two thirds of the link, larger ones all of it; continuous and increasing. Source: the
    latency–bandwidth form of Hockney (1994), with its latency saturating instead of constant so that small copies keep
    the fixed cost that is counted elsewhere.
    """
    b = np.maximum(moved_bytes, 0.0)
    return (b + half_speed_bytes * b / (b + half_speed_bytes)) / (bandwidth_gbps * GB_PER_S_IN_BYTES_PER_US)


def sector_bytes(pieces: Float64, piece_bytes: Float64, sector: float) -> Float64:
    """Return the bytes moved for pieces scattered over memory: their own and, on average, a sector's unused rest.

    A piece of p bytes at an arbitrary place touches p/sector + 1 sectors on average, at least one; aligned rows of
    whole sectors have no unused rest. Whole sectors, p + (sector − p mod sector), would jump between these;
    ``p + sector·exp(−p/sector)`` does not. Source: 32-byte sectors of NVIDIA GPUs (CUDA C++ Best Practices Guide,
    "Coalesced Access").
    """
    return pieces * (piece_bytes + sector * np.exp(-piece_bytes / sector))


def overlapped(first_us: Float64, second_us: Float64) -> Float64:
    """Return the time of two kinds of overlapping work, µs: the p-norm, at most 2^(1/p) times the longer one.

    ``SHARPNESS`` p = ∞ would be the roofline's max (Williams et al., 2009); real kernels overlap a little less.
    """
    longest = np.maximum(np.maximum(first_us, second_us), 1e-12)
    return longest * ((first_us / longest) ** SHARPNESS + (second_us / longest) ** SHARPNESS) ** (1.0 / SHARPNESS)


T = TypeVar("T")


class FamilyCalls(list[OpCall]):
    """Calls of one family that are priced on several devices: their columns are made once."""

    @cached_property
    def table(self) -> CallTable:
        """Return the columns of the calls."""
        return CallTable.made_of(self[0].family, self)


@dataclass(frozen=True)
class CallTable:
    """Columns of n calls of one family.

    ``groups`` are the distinct (kind, dtype), a kind with its layout after a colon ("add:broadcast", "h2d:pinned");
    ``group`` [n] indexes them, so that values by kind and dtype are looked up once per group. ``dims`` [n, d] is in the
    order of ``DIMENSIONS``; bytes and operations are floats.
    """

    calls: Sequence[OpCall]
    family: Family
    dims: Float64
    flops: Float64
    bytes_read: Float64
    bytes_written: Float64
    groups: list[tuple[str, str]]
    group: Int64
    _kept: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, family: Family, calls: Sequence[OpCall]) -> CallTable:
        """Return the columns of calls, or those kept by ``FamilyCalls``; missing sizes of a call are 1."""
        if isinstance(calls, FamilyCalls) and calls and calls[0].family is family:
            return calls.table
        return cls.made_of(family, calls)

    @classmethod
    def made_of(cls, family: Family, calls: Sequence[OpCall]) -> CallTable:
        """Return newly made columns of calls; missing sizes of a call are 1."""
        n, width = len(calls), len(DIMENSIONS[family])
        rows = [call.dims for call in calls]
        if any(len(row) != width for row in rows):
            rows = [(*row, *(1,) * width)[:width] for row in rows]
        codes: dict[tuple[str, str, str], int] = {}
        if family is Family.TRANSFER:
            # The speed depends on whether the host's memory is pinned.
            labels = [next((flag for flag in c.flags if flag in ("pinned", "pageable")), "") for c in calls]
        elif family in (Family.GEMM, Family.CONV):
            labels = [""] * n
        else:
            # Efficiencies do not distinguish channels last; corrections do.
            labels = ["" if c.layout == "nhwc" else c.layout for c in calls]
        group = np.fromiter((codes.setdefault((c.kind, label, c.dtype), len(codes))
                             for c, label in zip(calls, labels, strict=True)), np.int64, n)
        return cls(
            calls, family, np.array(rows, np.float64).reshape(n, width),
            np.fromiter((c.flops for c in calls), np.float64, n),
            np.fromiter((c.bytes_read for c in calls), np.float64, n),
            np.fromiter((c.bytes_written for c in calls), np.float64, n),
            [(f"{kind}:{label}" if label else kind, dtype) for kind, label, dtype in codes], group)

    def __len__(self) -> int:
        return len(self.group)

    @property
    def bytes_moved(self) -> Float64:
        """Return bytes read and written [n]."""
        return self.bytes_read + self.bytes_written

    def once(self, what: Hashable, make: Callable[[], T]) -> T:
        """Return ``make()``, or the value kept for an equal ``what`` and these calls. Callers must not change the
        value."""
        if what not in self._kept:
            self._kept[what] = make()
        return self._kept[what]  # type: ignore[no-any-return]

    def dim(self, name: str) -> Float64:
        """Return one size of every call [n]; zero and negative sizes count as one."""
        return self.once(("dim", name), lambda: np.maximum(self.dims[:, DIMENSIONS[self.family].index(name)], 1.0))

    def flagged(self, flag: str) -> Float64:
        """Return 1 for every call with a flag, 0 for the others [n]."""
        return self.once(("flag", flag), lambda: np.fromiter(
            (flag in call.flags for call in self.calls), np.float64, len(self)))

    def by_dtype(self, value: Callable[[str], float]) -> Float64:
        """Return ``value`` of each call's dtype [n]."""
        return np.array([value(dtype) for _, dtype in self.groups], np.float64)[self.group]

    def by_kind(self, value: Callable[[str], float]) -> Float64:
        """Return ``value`` of each call's kind (with its layout after a colon) [n]."""
        return np.array([value(kind) for kind, _ in self.groups], np.float64)[self.group]

    def item_bytes(self) -> Float64:
        """Return the bytes of an element of each call's dtype [n]."""
        return self.by_dtype(itemsize)


@dataclass(frozen=True, slots=True)
class KernelWork:
    """Times of n calls at published rates, µs [n]: of the arithmetic and of the memory traffic, which overlap.

    ``kernels`` [n] is the number of kernels of a call; each costs a device's kernel floor.
    """

    compute_us: Float64
    memory_us: Float64
    kernels: Float64


WorkFunction = Callable[[CallTable, DeviceSpec], KernelWork]
WORK: dict[Family, WorkFunction] = {}
HOST_WORK: dict[Family, WorkFunction] = {}
_MODULES = ("products", "attention", "embedding", "on_host")


def work_of(*families: Family, on_host: bool = False) -> Callable[[WorkFunction], WorkFunction]:
    """Register the work function of families; ``on_host``: the function for a CPU, if different."""
    def register(function: WorkFunction) -> WorkFunction:
        for family in families:
            (HOST_WORK if on_host else WORK)[family] = function
        return function
    return register


def work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work of calls; a family without a function is priced by its bytes and operations."""
    _register()
    known = WORK | HOST_WORK if device.vendor == "host" else WORK
    return known.get(table.family, WORK[Family.OTHER])(table, device)


@cache
def _register() -> None:
    """Import the files that register work functions: those here, and the families' own."""
    for name in _MODULES:
        import_module(f"kernel_models.heuristics.{name}")
    import_module("kernel_models.families").load()


def vector_us(table: CallTable, device: DeviceSpec) -> Float64:
    """Return the time of operations at the peak rate of the vector (not matrix) units, µs [n].

    Element-wise kernels compute 16-bit and narrower types in fp32, so that rate is used. Source: peak rates of the
    device's data sheet; ATen's ``opmath_type``.
    """
    return table.flops / table.by_dtype(
        lambda d: peak_tflops(device, d if d in ("fp64", "complex128") else "fp32", matrix=False)) / 1e6


def one(table: CallTable) -> Float64:
    """Return 1 for every call: one kernel each [n]."""
    return np.ones(len(table))


SECTOR_BYTES = 32.0
"""Least bytes of a memory access (NVIDIA; AMD's is 64, which the efficiency absorbs)."""
ROWS_PER_UNIT = 2.0
"""Rows that each unit needs for the whole bandwidth: one block works on a row. Set, not measured."""
LONE_ROWS = 8.0
"""Number of rows whose share of the bandwidth a single block can use: its threads have 64 KB in flight, and a load
takes some 0.6 µs. It matters where a step has a row or two, as in decoding for one sequence."""
RADIX_PASS_BITS = 8
"""Bits of the key sorted in one pass over the data (CUB's radix sort: 5 to 8)."""


@work_of(Family.ELEMENTWISE, Family.MEMSET, Family.RANDOM, Family.LOSS, Family.POOLING, Family.INTERPOLATE,
         Family.OPTIMIZER, Family.TRITON, Family.OTHER)
def streaming_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the time of moving each byte once at the memory's bandwidth, µs; faster where it stays in the cache.

    Source: roofline (Williams et al., 2009); ``memory_us``.
    """
    return KernelWork(vector_us(table, device), memory_us(table.bytes_moved, device), one(table))


@work_of(Family.COPY, Family.CONCAT)
def copy_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the time of bytes read in runs, written contiguously, µs; short runs cost whole ``sector_bytes``."""
    piece = table.dim("inner") * table.item_bytes()
    pieces = table.bytes_read / np.maximum(piece, 1.0)
    # A transposition through shared memory reads whole sectors too: a run costs at most four times its bytes.
    read = np.minimum(sector_bytes(pieces, piece, SECTOR_BYTES), 4.0 * table.bytes_read)
    return KernelWork(vector_us(table, device), memory_us(read + table.bytes_written, device), one(table))


@work_of(Family.INDEX)
def index_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work of pieces gathered from or scattered to any place: whole sectors each, µs (``sector_bytes``)."""
    piece = table.dim("inner") * table.item_bytes()
    pieces = table.dim("elements") / table.dim("inner")
    extra = np.maximum(sector_bytes(pieces, piece, SECTOR_BYTES) - pieces * piece, 0.0)
    return KernelWork(vector_us(table, device), memory_us(table.bytes_moved + extra, device), one(table))


@work_of(Family.REDUCTION, Family.SOFTMAX)
def reduction_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the time of the bytes at the bandwidth of the units that the results keep busy, µs.

    A reduction over everything is split over all units; a reduction over rows gives each row to a block or part of one.
    """
    parallel = np.maximum(table.dim("outer"), table.dim("reduced") / 4096.0)
    return KernelWork(
        vector_us(table, device), memory_us(table.bytes_moved, device) * _idle(parallel, device), one(table)
    )


@work_of(Family.NORM)
def norm_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the time of bytes at the bandwidth of the units that rows or groups keep busy, µs; long groups are split.

    With a fused addition (flag "add") each unit requests two rows at a time: twice the bytes in about the time.
    """
    parallel = np.maximum(table.dim("rows"), table.dim("rows") * table.dim("columns") / 16384.0)
    parallel = parallel * np.fromiter((2.0 if "add" in call.flags else 1.0 for call in table.calls), np.float64,
                                      len(table))
    return KernelWork(
        vector_us(table, device), memory_us(table.bytes_moved, device) * _idle(parallel, device), one(table)
    )


@work_of(Family.SORT)
def sort_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work of a radix sort's passes over keys and positions, µs; top-k has about two passes' traffic.

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
    """Return the work of a recurrent network, µs: a kernel per step, layer and direction; products on the matrix units.

    Source: cuDNN's recurrent layers (Appleyard et al., 2016): inputs of all steps as one product, hidden ones in turn.
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    kernels = table.dim("sequence") * table.dim("layers") * table.dim("directions")
    return KernelWork(table.flops / peak / 1e6, memory_us(table.bytes_moved, device), kernels)


def _idle(parallel: Float64, device: DeviceSpec) -> Float64:
    """Return the factor on moving bytes with few blocks [n]: 1 from ``ROWS_PER_UNIT`` blocks per unit."""
    return np.maximum(1.0, device.sm_count * ROWS_PER_UNIT / np.maximum(parallel, LONE_ROWS))


HALF_SPEED_BYTES = 64e3
"""b½ of a link: the size at which a copy reaches two thirds of its speed. Assumed, of the order bandwidthTest shows."""


@work_of(Family.TRANSFER)
def transfer_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Return the work of a copy over PCIe or NVLink, or twice over the memory within the device, µs (``link_us``).

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
    """Return the plain form of a copy's kind: "d2d", "DtoD", "device_to_device" → "dtod"; "p2p" → "ptop"."""
    kind = kind.lower().split(":")[0]
    return kind.replace("device", "d").replace("host", "h").replace("_", "").replace("2", "to")
