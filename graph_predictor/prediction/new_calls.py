"""Calls of recorded work at other sizes: what every way to another size asks of one piece."""

from __future__ import annotations

from fractions import Fraction

from kernel_models.families.copy import memset, transfer
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, calls_of


def copied_calls(old: tuple[OpCall, ...], growth: Fraction | float) -> tuple[OpCall, ...] | None:
    """A lone copy or memset with ``growth`` times the bytes; ``None`` where the calls are none, or its bytes unknown.
    """
    if len(old) != 1 or old[0].family not in (Family.TRANSFER, Family.MEMSET) or "unsized" in old[0].flags:
        return None
    size = round(old[0].dims[0] * growth)
    return (memset(size) if old[0].family is Family.MEMSET else transfer(old[0].kind, size, old[0].flags),)


def remade_calls(old: tuple[OpCall, ...], before: Operation, after: Operation) -> tuple[OpCall, ...] | None:
    """Calls of an operation at its new sizes; ``None`` where those at the old ones are not what was recorded, so that
    the formulas do not say what the operation did."""
    tf32 = any(call.dtype == "tf32" for call in old)
    return calls_of(after, tf32) if calls_of(before, tf32) == old else None


__all__ = ["copied_calls", "remade_calls"]
