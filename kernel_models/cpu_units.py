"""Prices of narrow element types on a processor that was not measured, from its vector and matrix instructions.

A unit's gain over fp32 lies between none (memory, casts and small sizes decide) and the ratio of peak rates. The
geometric middle is taken, and the interval holds both. Without a unit PyTorch widens or emulates the type. Products
measured without a unit set that cost (``benchmarks/narrow_products.py``); it differs by size and by which operand is
transposed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from kernel_models.op_call import PRODUCTS, OpCall, itemsize

NARROW = ("bf16", "fp16", "int8")
_PEAKS = {
    "bf16": {"amx_bf16": 16.0, "avx512_bf16": 2.0, "bf16": 4.0},
    "fp16": {"amx_fp16": 16.0, "avx512_fp16": 2.0, "asimdhp": 2.0},
    "int8": {"amx_int8": 32.0, "avx512_vnni": 4.0, "avx_vnni": 4.0, "i8mm": 8.0, "asimddp": 4.0},
}
"""Peak rate of a unit over fp32's, the quickest unit first. Intel 64 and IA-32 Architectures Optimization Reference
Manual: AMX does 1,024 operations of bf16 or 2,048 of int8 a cycle and core where AVX-512 does 64 of fp32; VDPBF16PS and
fp16 instructions do two where fp32 does one, VNNI four. Arm Architecture Reference Manual: an instruction of BFMMLA has
16 products and one of SMMLA 32 where FMLA has 4."""
AROUND_UNITS = 0.25
"""Log half width added beyond both ends of a unit's possible gain. Set, not measured."""
EMULATED = math.log(6.0)
"""Log half width (80%) of products without a unit. On an EPYC with AVX2, bf16 took 2.4 to 152 times as long as fp32 (16
in the geometric mean of nine products), and fp16 5 to 162 times (``benchmarks/narrow_products.py``)."""
UNKNOWN = math.log(16.0)
"""Log half width where the processor's units are unknown: from emulation to the widest unit. Set, not measured."""
OTHER_WORK = math.log(3.0)
"""Log half width, without a unit, of work that is no product: its numbers are converted. Set, not measured."""
MEASURED = 0.3
"""Log half width where a calibration measured products of the narrow type. Set, not measured."""


@dataclass(frozen=True, slots=True)
class Retyped:
    """An operation in another element type.

    Attributes:
        calls: Calls to price instead of the recorded ones.
        factor: Factor on the time of these calls.
        spread: Log half width that the change of type adds to the interval; 0 where the type is unchanged.
        dtype: The narrow type before or after the change.
    """

    calls: tuple[OpCall, ...]
    factor: float = 1.0
    spread: float = 0.0
    dtype: str = ""


def unit_of(dtype: str, units: tuple[str, ...]) -> tuple[str, float]:
    """Return the unit that multiplies a narrow type and its peak rate over fp32's; ("", 0.0) without such a unit."""
    return next(((unit, peak) for unit, peak in _PEAKS[dtype].items() if unit in units), ("", 0.0))


def retyped(was: tuple[OpCall, ...], will: tuple[OpCall, ...], units: tuple[str, ...], *, measured: bool) -> Retyped:
    """Return how to price an operation that ran on a processor in one element type and shall run in another.

    Args:
        was: The calls as they ran.
        will: The calls as they shall run.
        units: Units of the processor (``tracer.cpu_units``); empty where unknown.
        measured: Whether the models were fitted to products of narrow types on this processor.
    """
    old, new = _narrow(was), _narrow(will)
    if old == new or not was or not will:
        return Retyped(will)
    # Autocast runs these in 16 bits (torch.amp, "CUDA Ops that can autocast to float16").
    product = any(call.family in PRODUCTS for call in will)
    if measured:
        return Retyped(will, 1.0, MEASURED, new or old)
    peaks = {dtype: unit_of(dtype, units)[1] for dtype in (old, new) if dtype}
    if not all(peaks.values()):
        lacking = EMULATED if units else UNKNOWN
        return Retyped(will, 1.0, lacking if product else OTHER_WORK, new or old)
    wide = was[0].dtype
    same = tuple(_in_type(call, wide) for call in will)
    if not product:
        gain = math.sqrt(itemsize(wide) / itemsize(new or will[0].dtype))
    else:
        gain = math.sqrt(peaks.get(new, 1.0) / peaks.get(old, 1.0))
    return Retyped(same, 1.0 / gain, abs(math.log(gain)) + AROUND_UNITS, new or old)


def said_of(dtype: str, units: tuple[str, ...], *, measured: bool) -> str:
    """Return a sentence that says how products of a narrow type were priced on a processor."""
    unit, peak = unit_of(dtype, units)
    if measured:
        return f"Products in {dtype} are priced as calibrated on this processor."
    if unit:
        return (f"The processor multiplies {dtype} ({unit}): its products were taken to gain between nothing and "
                f"{peak:g} times fp32's rate; foretrace calibrate measures it.")
    if not units:
        return (f"The recording does not say whether its processor multiplies {dtype}: the interval holds both; "
                "foretrace calibrate measures it.")
    return (f"The processor has no unit for {dtype}, which PyTorch emulates: products take several to over a hundred "
            "times as long as in fp32, by their sizes, so that the interval is wide; foretrace calibrate measures it.")


def _narrow(calls: tuple[OpCall, ...]) -> str:
    """Return the first narrow element type among the calls; "" where there is none."""
    return next((call.dtype for call in calls if call.dtype in NARROW), "")


def _in_type(call: OpCall, dtype: str) -> OpCall:
    change = itemsize(dtype) / itemsize(call.dtype)
    return replace(call, dtype=dtype, bytes_read=call.bytes_read * change, bytes_written=call.bytes_written * change)
