"""What a device sustains of its published rates whatever the kernel: long copies, and products within its power."""

from __future__ import annotations

from collections.abc import Mapping

from kernel_models.device import DeviceSpec
from kernel_models.op_call import Family

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
"""Times these of operands that do not lie side by side, whose places each element's thread computes."""
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
