"""Convolutions as implicit matrix products."""

from __future__ import annotations

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.dtypes import multiply_adds
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.curves import memory_us
from kernel_models.heuristics.sustained import peak_tflops
from kernel_models.heuristics.tiles import padded_product_us
from kernel_models.heuristics.work import KernelWork, one, vector_us, work_of
from kernel_models.op_call import Family
from tracer.arrays import Float64


@work_of(Family.CONV)
def convolution_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Time of the implicit product in whole tiles and waves, and of input, weights and output once each, µs.

    Forward: m = batch·output positions, n = output channels of a group, k = input channels of a group · kernel size;
    the gradient of the input swaps input and output channels, with k shared out over the stride; that of the weights
    contracts over batch and positions. A depthwise kernel does no products but sums on the other units: the quicker
    form counts. Source: cuDNN (Chetlur et al., 2014, "implicit GEMM"); NVIDIA "Convolutional Layers User's Guide".
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    groups, inputs, outputs, m, n, k = table.once("product", lambda: _product(table))
    product = padded_product_us(groups, m, n, k, peak, device)
    direct = np.where(np.minimum(inputs, outputs) <= 4, vector_us(table, device), np.inf)
    return KernelWork(np.minimum(product, direct), memory_us(table.bytes_moved, device), one(table))


def _product(table: CallTable) -> tuple[Float64, Float64, Float64, Float64, Float64, Float64]:
    """Groups, input and output channels of one, and m, n and k of the implicit product [n] each."""
    groups = table.dim("groups")
    batch = table.dim("batch")
    inputs = np.maximum(table.dim("in_channels") / groups, 1.0)
    outputs = np.maximum(table.dim("out_channels") / groups, 1.0)
    in_positions = batch * table.dim("in_d") * table.dim("in_h") * table.dim("in_w")
    out_positions = batch * table.dim("out_d") * table.dim("out_h") * table.dim("out_w")
    kernel = table.dim("kernel_d") * table.dim("kernel_h") * table.dim("kernel_w")
    # The gradient of the input has a position for each input; only 1/stride of the kernel's taps reach each.
    taps = np.maximum(kernel * np.minimum(out_positions / in_positions, 1.0), 1.0)
    is_input = table.by_kind(lambda kind: float("dgrad" in kind)) > 0
    is_weight = table.by_kind(lambda kind: float("wgrad" in kind)) > 0
    m = np.where(is_weight, outputs, np.where(is_input, in_positions, out_positions))
    n = np.where(is_weight, inputs * kernel, np.where(is_input, inputs, outputs))
    k = np.where(is_weight, out_positions, np.where(is_input, outputs * taps, inputs * kernel))
    return groups, inputs, outputs, m, n, k * table.by_dtype(multiply_adds)
