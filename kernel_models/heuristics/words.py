"""The cost of products whose operands' rows are no whole number of a kernel's loads, or of a tile's depth."""

from __future__ import annotations

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.dtypes import itemsize
from kernel_models.heuristics.call_classes import ROWS
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.sustained import computed_as
from tracer.arrays import Bool, Float64

LOAD_BYTES, LEAST_BYTES = 16, 4
"""A row of whole loads of 16 bytes is copied to shared memory by the widest; the narrowest asynchronous one has 4 (CUDA
C++ Programming Guide, ``cp.async``). Rows of 16 bits at odd places are read value by value."""
NARROW, SINGLE = 1.49, 3.61
"""Times the arithmetic takes where the shortest-aligned row is no multiple of 16, and of 4 bytes.

Fitted: an A100's sweep through the contraction (``vocab_h_sweep`` of ``kernels/gemm_alignment_fp16``, medians over rows
of whole loads; ``benchmarks/shape_advice.py`` computes them again and judges the other sweeps). Taken for all of
NVIDIA's data center boards with matrix units, of which A100 and V100 were measured; the MI250X of that table shows
none."""
DEPTH_BYTES = 64
"""Bytes of a contraction that a tile takes at a time: 32 values of 16 bits, as kernels' names tell
("ampere_fp16_s16816gemm_fp16_128x128_ldg8_f2f_stages_32x5_tn")."""


def affected(table: CallTable, device: DeviceSpec) -> Bool:
    """Return whether calls are products that matrix units compute on a board that was measured, or is like one that
    was.

    Boards with GDDR memory have what unaligned rows cost among the corrections that steps have taught."""
    like = device.vendor == "nvidia" and not device.memory_kind.startswith("GDDR")
    return table.by_dtype(lambda dtype: float(
        like and computed_as(device, dtype) in device.matrix_tflops and itemsize(dtype) <= 4 and dtype != "fp32")) > 0


def narrow_rows(table: CallTable, device: DeviceSpec) -> Float64:
    """Factor of the arithmetic for rows that are no whole number of the widest loads [n]."""
    return np.where(affected(table, device), table.once("narrow rows", lambda: _narrow(table)), 1.0)


def _narrow(table: CallTable) -> Float64:
    """The same where it counts."""
    by_name = {name: table.dim(name) * table.item_bytes() for name in "mnk"}
    rest: Float64 = np.full(len(table), float(LOAD_BYTES))
    layouts = np.array([ROWS.get(call.layout, "nk") for call in table.calls])
    for rows in np.unique(layouts).tolist() if len(table) else []:
        mine = layouts == rows
        for name in rows:
            row = by_name[name].astype(np.int64)
            rest[mine] = np.minimum(rest, np.minimum(row & -row, LOAD_BYTES))[mine]
    return np.where(rest >= LOAD_BYTES, 1.0, np.where(rest >= LEAST_BYTES, NARROW, SINGLE))


def whole_depth(table: CallTable, device: DeviceSpec) -> Float64:
    """The contraction in whole steps of a tile [n]."""
    k, step = table.dim("k"), DEPTH_BYTES / table.item_bytes()
    return np.where(affected(table, device), np.ceil(k / step) * step, k)
