"""Calls of recorded work at other sizes: what every way to another size asks of one piece."""

from __future__ import annotations

from fractions import Fraction

from kernel_models.families.copy import memset, transfer
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, calls_of


def resized_calls(old: tuple[OpCall, ...], before: Operation, after: Operation, growth: Fraction | float) -> tuple[
        OpCall, ...] | None:
    """Return the calls of recorded work at its new sizes; ``None`` where they cannot be made.

    A lone copy or memset has ``growth`` times the bytes. Of other work the calls are those of the operation, unless at
    the old sizes these are not what was recorded: then the formulas do not say what the operation did.
    """
    if len(old) == 1 and old[0].family in (Family.TRANSFER, Family.MEMSET) and "unsized" not in old[0].flags:
        size = round(old[0].dims[0] * growth)
        return (memset(size) if old[0].family is Family.MEMSET else transfer(old[0].kind, size, old[0].flags),)
    tf32 = any(call.dtype == "tf32" for call in old)
    return calls_of(after, tf32) if calls_of(before, tf32) == old else None
