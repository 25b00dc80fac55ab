"""The share of its matrix units' rate that a board's power limit leaves in a step that keeps them busy.

Tables of kernels are measured in bursts, at the boost clock. Where products follow each other for milliseconds, a board
whose matrix units would draw more than it may lowers their clock until they do not:

    t = max(t of the burst, operations · joules per operation / watts)

Energy per operation is taken to be the same at every clock: of 240 products of a B200 that bursts would run at 0.6 to
0.8 of the peak, all ended near 0.49 of it, whatever rate they would have had (``benchmarks/sustained_products.py``).
Memory traffic and other work are not slowed. All steps are priced so, traced, anchored or planned; an isolated call
(``foretrace price``) is not.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.sustained import computed_as
from kernel_models.op_call import Family
from kernel_models.pricing import PricedCalls
from tracer.arrays import Float64

WATTS_PER_TFLOPS = {"ampere": 1.34, "hopper": 0.97, "blackwell": 0.91}
"""Board power that 10¹² operations/s of 16-bit products take, all of the board's included.

Ampere: 0.718 of 312 TFLOP/s at the 300 W of an A100 PCIe 80 GB; Blackwell: 0.486 of 2,250 at the 1,000 W of a B200 (the
fitted half of SimuMax's tables, ``benchmarks/sustained_products.py``). Hopper: 720 TFLOP/s at the 700 W of an H100 and
an H200 SXM, as published by SemiAnalysis ("MI300X vs H100 vs H200 Benchmark", December 2024: products of training, not
of zeros), which also gives 1,280 in fp8. Newer processes take less, as they should; boards without a figure are left as
they are (GeForce and T4 to L40S boards: ``heuristics.sustained``)."""
COST_OF_TYPE = {"fp16": 1.0, "bf16": 1.0, "fp8": 0.56, "int8": 0.56, "fp4": 0.31, "tf32": 2.0}
"""Energy of an operation of each type, 16-bit ones 1: fp8 by the two Hopper figures above; fp4 half as much again less,
tf32 twice, by their peaks: assumed."""
LIMITED = frozenset((Family.GEMM, Family.ATTENTION, Family.CONV))


def sustained_tflops(device: DeviceSpec, dtype: str) -> float:
    """The rate of products that the board's power feeds, 10¹² operations/s; infinite where nothing is known of it."""
    watts = WATTS_PER_TFLOPS.get(device.architecture)
    cost = COST_OF_TYPE.get(computed_as(device, dtype))
    if watts is None or cost is None or not device.power_w:
        return np.inf
    return device.power_w / (watts * cost)


def sustained(priced: PricedCalls, device: DeviceSpec) -> PricedCalls:
    """The same calls in a step that keeps the device busy; intervals keep their relative width."""
    rates: dict[str, float] = {}
    least: Float64 = np.zeros(len(priced.calls))
    for i, call in enumerate(priced.calls):
        if call.family in LIMITED:
            if call.dtype not in rates:
                rates[call.dtype] = sustained_tflops(device, call.dtype)
            least[i] = call.flops / rates[call.dtype] / 1e6
    slower = np.maximum(least / priced.time_us, 1.0)
    return replace(priced, time_us=priced.time_us * slower, low_us=priced.low_us * slower,
                   high_us=priced.high_us * slower)
