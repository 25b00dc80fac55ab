"""Rates that a device sustains whatever the kernel, and curves of time over bytes at those rates.

Curves are continuous, never fall as bytes grow, and start at no time for no bytes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family
from tracer.arrays import Float64

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
"""Where no measurement of the memory is at hand: NVIDIA's HBM (above; copies on a B300 are published to reach 0.90),
AMD's as BabelStream results on MI250X and MI300X are published, about four fifths of the peak. The host's own
bandwidth is what its calibration measured."""

WATTS_PER_TFLOPS = {("turing", False): 13.9, ("ada", False): 7.0, ("rtx-blackwell", False): 6.6,
                    ("turing", True): 1.73, ("ada", True): 0.97, ("rtx-blackwell", True): 0.97}
"""Board power that one 10¹² operations/s take, by architecture and whether on matrix units.

Large fp32 products of NeuSight run at 5.0 TFLOP/s on a T4 (70 W) and 10.3 on an L4 (72 W); Ada's matrix units from
bf16 products on an L40S, which its 350 W do not slow; Turing's by the ratio of its peaks. RTX Blackwell's fp32: the
best of cuBLASLt on an RTX 5090 (83 TFLOP/s at 575 W), an RTX PRO 6000 (84, 600 W) and an RTX PRO 5000 (52, 300 W), as
published in github.com/xzwgit/gpu-flops-bench; its matrix units are taken to be like Ada's, of the same process (the
PRO 5000's 257 TFLOP/s of bf16 at 300 W say no more than 1.17). Others are not limited.
"""


REACHED_MATRIX = {"cdna2": 0.58, "cdna3": 0.58, "cdna4": 0.58}
"""Share of the published matrix rate that large products reach before any kernel's own efficiency.

AMD's matrix units lower their clock under load: large bf16 products on an MI300X run at 0.45 of the peak where NVIDIA's
reach 0.78 (trace `torch-compile-mi300`, TraceLens); CDNA 2 and 4 are taken to be like it.
"""


_ONE_PASS, _TWO_PASSES, _ATTENTION = 1.0, 1.8, 3.5
SCATTERED = 1.7
"""Times these of operands that do not lie side by side, whose places each element's thread computes. Set, not
measured."""
MOST_FLOORS: Mapping[str, Mapping[Family, float]] = {"blackwell": {
    **dict.fromkeys((Family.ELEMENTWISE, Family.COPY, Family.TRITON, Family.MEMSET, Family.RANDOM, Family.POOLING,
                     Family.INTERPOLATE, Family.OPTIMIZER), _ONE_PASS),
    **dict.fromkeys((Family.NORM, Family.SOFTMAX, Family.REDUCTION, Family.CONCAT, Family.INDEX, Family.EMBEDDING,
                     Family.LOSS, Family.OTHER), _TWO_PASSES),
    Family.GEMM: 2.2, Family.ATTENTION: _ATTENTION}}
"""By architecture and family, the most kernel floors that a kernel costs before its work, of the default efficiencies.

Those are multiples that V100, A100 and tables of long calls left, whose times are whole microseconds or say little of
short ones; on a B200 short kernels take a floor or two (trace `vllm-eager-B200`, whose kinds of kernels
``benchmarks/inference_kernels.py`` prints in two halves).
Of products, what bf16's tables left. Other architectures are not limited: on an H100 norms, reductions and softmax of
short rows are priced at twice what they take, too, but whole recorded steps then err more the other way.
"""


def most_floors(device: DeviceSpec, family: Family, scattered: bool = False) -> float:
    """Kernel floors that a kernel of a family costs at most, before its work."""
    most = MOST_FLOORS.get(device.architecture, {}).get(family, float("inf"))
    return SCATTERED * most if scattered else most


_WIDER = {"fp4": "fp8", "fp8": "fp16", "fp16": "fp32", "bf16": "fp32"}


def bandwidth_gbps(device: DeviceSpec) -> float:
    """Bandwidth that long copies reach, reads and writes together, 10⁹ bytes/s."""
    reached = REACHED_BANDWIDTH.get((device.architecture, device.memory_kind), REACHED_BY_VENDOR[device.vendor])
    return device.memory_bandwidth_gbps * reached


def computed_as(device: DeviceSpec, dtype: str) -> str:
    """The type that products of an element type are computed in on a device.

    Where matrix units lack an 8- or 4-bit type, operands are widened to the next type these have. Without matrix units
    for 16-bit types, cuBLAS and rocBLAS multiply them in fp32, as PyTorch asks them to ("compute type" of
    ``cublasGemmEx``), whatever the rate of fp16 arithmetic is.
    """
    if device.vendor == "host":
        return dtype
    while dtype in _WIDER and dtype not in device.matrix_tflops:
        dtype = _WIDER[dtype]
    return dtype


def peak_tflops(device: DeviceSpec, dtype: str, *, matrix: bool) -> float:
    """The published rate, or what the board's power feeds if that is less, 10¹² operations/s."""
    if matrix:
        dtype = computed_as(device, dtype)
    peak = device.peak_tflops(dtype, matrix=matrix)
    on_matrix = matrix and device.matrix_tflops.get(dtype) == peak
    watts = WATTS_PER_TFLOPS.get((device.architecture, on_matrix))
    if on_matrix:
        peak *= REACHED_MATRIX.get(device.architecture, 1.0)
    if watts is None or dtype in ("fp64", "complex128"):
        return peak
    # A matrix rate of 8 bits takes as much power as half of it in 16, one of 4 bits as a quarter.
    narrow = {"fp8": 2.0, "int8": 2.0, "fp4": 4.0}.get(dtype, 1.0) if on_matrix else 1.0
    return min(peak, narrow * device.power_w / watts)


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
"""Power of the norm in which arithmetic and traffic of a kernel overlap (``overlapped``). Set: at most 19% above the
roofline's maximum. Corrections were fitted with it (``step_fit``)."""


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


def overlapped(first_us: Float64, second_us: Float64) -> Float64:
    """Time of two kinds of work that overlap, µs: the p-norm, near the longer one and at most 2^(1/p) times it.

    ``SHARPNESS`` p = ∞ would be the roofline's max (Williams et al., 2009); real kernels overlap a little less.
    """
    longest = np.maximum(np.maximum(first_us, second_us), 1e-12)
    return longest * ((first_us / longest) ** SHARPNESS + (second_us / longest) ** SHARPNESS) ** (1.0 / SHARPNESS)
