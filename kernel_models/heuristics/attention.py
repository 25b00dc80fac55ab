"""Fused attention: its operations at the matrix units' rate over whole blocks of queries, or its bytes."""

from __future__ import annotations

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.call_table import CallTable
from kernel_models.heuristics.curves import memory_us
from kernel_models.heuristics.sustained import peak_tflops
from kernel_models.heuristics.tiles import filled_units
from kernel_models.heuristics.work import KernelWork, one, work_of
from kernel_models.op_call import Family

QUERY_BLOCK = 128.0
"""Queries of one block (FlashAttention-2 and -3, and cuDNN's fused attention)."""
KEY_BLOCK = 64.0
"""A block of queries costs as much as this many keys more, for its start and end."""


@work_of(Family.ATTENTION)
def attention_work(table: CallTable, device: DeviceSpec) -> KernelWork:
    """Time of the call's operations over the share of units that blocks of queries (forward) or keys fill, µs.

    The call counts 4·batch·heads·queries·keys·size operations, half of the square part when causal, 2.5 times as many
    backward. blocks = batch·heads·⌈queries/128⌉; short sequences of few heads leave units idle unless keys are split
    (flash decoding), as is assumed for less than a block of queries. Source: Dao, FlashAttention-2 (2023), sections
    3.1 and 3.2.
    """
    peak = table.by_dtype(lambda dtype: peak_tflops(device, dtype, matrix=True))
    batch, heads = table.dim("batch"), table.dim("heads")
    queries, keys = table.dim("q_len"), table.dim("kv_len")
    blocks = batch * heads * np.ceil(queries / QUERY_BLOCK)
    # Decoding splits the keys into pieces that fill the device.
    blocks = np.where(queries < QUERY_BLOCK, np.maximum(blocks, np.minimum(batch * heads * np.ceil(keys / 512.0),
                                                                           device.sm_count)), blocks)
    padding = np.ceil(queries / QUERY_BLOCK) * QUERY_BLOCK / queries
    padded = np.where(queries < QUERY_BLOCK, np.maximum(QUERY_BLOCK / 2 / queries, 1.0), padding)
    compute = table.flops * padded * (1.0 + KEY_BLOCK / keys) / peak / 1e6 / filled_units(blocks, device)
    return KernelWork(compute, memory_us(table.bytes_moved, device), one(table))
