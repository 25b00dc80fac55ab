"""Matrix products: tiles and waves at the matrix units' rate, or the operands' bytes, whichever takes longer."""

from __future__ import annotations

import math

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.dtypes import multiply_adds, stored_itemsize
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.curves import GB_PER_S_IN_BYTES_PER_US, memory_us
from kernel_models.heuristics.sustained import bandwidth_gbps, peak_tflops
from kernel_models.heuristics.tiles import padded_product_us
from kernel_models.heuristics.words import narrow_rows, whole_depth
from kernel_models.heuristics.work import KernelWork, one, vector_us, work_of
from kernel_models.op_call import Family
from tracer.arrays import Float64

FEW = 16
"""Rows and columns of a result up to which its sums may be done without matrix units: their smallest product."""

STREAMED = {"hopper": 0.83, "ampere": 0.96}
"""Time of a weight's byte over that of other operands': products of few rows read their weights at 0.88 of an H100's
published bandwidth and at 0.77 of an A100's (``gemm_forward``, m up to 64, weights of 64 MB and more)."""
DEPTH_FLOORS, DEEPEST = 6e-5, 8192.0
"""What each of the contraction's steps adds to a product's fixed cost, and from how many on it is split: blocks go
through all of them one after another. From the same rows of 1 to 8 MB: 0.2 ns for each of k on A100, H100 and H200
alike. Of 16 bits, and of 8 where activations are not cast beside the product."""
GROUPED = {"nt": 0.92, "nn": 0.86, "tn": 0.75}
"""Of the rate of single products, what grouped ones reach, by layout: forward, input gradient, weight gradient. Of
SimuMax's rows those of an A100, and those of a B200 of 1,000 rows a group and more, beside their single products."""
GROUP_US = {"blackwell": 4.5}
"""What each group of such a product costs besides, µs, by architecture: Transformer Engine launches one product a
group, and on a B200 each is over before the next has filled the device (SimuMax's rows "chosen on" of
``benchmarks/inference_kernels.py``, groups of 128 to 10,000 rows). None on an A100. Fused kernels of servers pay
none."""
GROUPED_FP8 = 0.6
"""The same of 8 and 4 bits, besides: kernels that scale blocks of values on their way (DeepSeek's DeepGEMM publishes
0.5 to 0.7 of an H800's peak for groups of 4,096 rows, servers' Triton kernels reach less). Set, not measured."""
ROUTED = 0.5
"""The same of servers' fused kernels, which gather tokens of experts as they go (Triton's, Marlin's, of any type): in a
recorded step of gpt-oss the experts of 8,192 tokens reach 0.5 on an MI300X (trace ``vllm-cuda-graph``)."""

ROUTED_WIDENED, ROUTED_FP8 = 0.23, 0.3
"""The same on NVIDIA's GPUs for weights that are widened to 16 bits as they are read (Marlin's and Triton's kernels for
int4 and MXFP4), and for 8 bits scaled by blocks, where each expert has ``FILLED`` rows or more, as prompts have. Set
with times to the first token of the looked-at half of the serving table (``benchmarks/serving.py``), which judges them
by the other half; how quick experts of few rows are says ``ROUTED``."""
FILLED, BARE = 16.0, 4.0
"""Rows of an expert from which a block's products fill its time, and up to which its weights do."""


@work_of(Family.GEMM)
def gemm_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Time of 2·batch·m·n·k operations in whole tiles and waves, and of A, B and the output once each, µs.

    A product of a few rows by a few columns, such as the gradient of weights that mix attention heads, is summed up
    without matrix units, which would fill a tile with nothing: the quicker form counts. Source: roofline (Williams et
    al., 2009) with tile and wave quantisation (``tiles.padded_product_us``) and rows that are no whole number of loads
    (``words.narrow_rows``).
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    batch, m, n = (table.dim(name) for name in ("batch", "m", "n"))
    k = whole_depth(table, device) * table.by_dtype(multiply_adds)
    product = padded_product_us(batch, m, n, k, peak, device) * narrow_rows(table, device) / _grouped(table, device)
    direct = np.where(np.maximum(m, n) <= FEW, vector_us(table, device), np.inf)
    memory, fixed = memory_us(table.bytes_moved, device), one(table)
    if device.vendor == "nvidia" and not device.memory_kind.startswith("GDDR"):
        weights = table.once("weights", lambda: _weight_share(table))
        streamed = table.bytes_moved / (bandwidth_gbps(device) * GB_PER_S_IN_BYTES_PER_US)
        memory += weights * (streamed * STREAMED.get(device.architecture, 1.0) - memory)
        fixed += DEPTH_FLOORS * np.minimum(table.dim("k"), DEEPEST) * _goes_through(table)
    launched = _launched(table, device)
    return KernelWork(np.minimum(product, direct) + launched, memory + launched, fixed)


def _goes_through(table: CallTable) -> Float64:
    """Whether the depth of a call counts [n]."""
    counts = [dtype in ("fp16", "bf16") or (dtype == "fp8" and kind != "mm") for kind, dtype in table.groups]
    return np.array(counts, np.float64)[table.group]


def _weight_share(table: CallTable) -> Float64:
    """Share of the bytes that are the larger operand's: a weight's, where rows are few [n].

    No cache has kept it, since a model's other weights were read after it."""
    k, many = table.dim("k"), np.maximum(table.dim("m"), table.dim("n"))
    size = np.array([stored_bytes(call.flags, call.dtype) for call in table.calls])
    weight = table.dim("batch") * many * k * size
    return np.minimum(weight / np.maximum(table.bytes_moved, 1.0), 1.0)


def stored_bytes(flags: tuple[str, ...], dtype: str) -> float:
    """Bytes of a weight's element, which may be stored in another type than it is multiplied in (flag "weight_fp4")."""
    kept = next((flag[7:] for flag in flags if flag.startswith("weight_")), dtype)
    return stored_itemsize(kept)


def _grouped(table: CallTable, device: DeviceSpec) -> Float64:
    """Share of a single product's rate that grouped ones reach [n]."""
    found = np.ones(len(table))
    narrow = table.by_dtype(lambda dtype: GROUPED_FP8 if dtype in ("fp8", "fp4", "int8") else 1.0)
    rows = table.dim("m")
    for i, call in enumerate(table.calls):
        if call.kind == "grouped":
            found[i] = (_routed(call.dtype, call.flags, float(rows[i]), device) if "routed" in call.flags else
                        GROUPED.get(call.layout, GROUPED["nt"]) * narrow[i])
    return found


def _launched(table: CallTable, device: DeviceSpec) -> Float64:
    """What the groups of grouped products cost besides, µs [n]."""
    each = GROUP_US.get(device.architecture, 0.0)
    apart = [each if call.kind == "grouped" and "routed" not in call.flags else 0.0 for call in table.calls]
    return table.dim("batch") * np.array(apart, np.float64)


def _routed(dtype: str, flags: tuple[str, ...], rows: float, device: DeviceSpec) -> float:
    """Share of a single product's rate that a server's fused experts of so many rows each reach."""
    widened = any(flag.startswith("weight_") for flag in flags)
    if device.vendor != "nvidia" or not (widened or dtype == "fp8"):
        return ROUTED
    filled = ROUTED_WIDENED if widened else ROUTED_FP8
    way = min(max(math.log(max(rows, 1.0) / BARE) / math.log(FILLED / BARE), 0.0), 1.0)
    return ROUTED * (filled / ROUTED) ** way
