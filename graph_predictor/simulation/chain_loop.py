# mypy: disable-error-code="no-untyped-def"
"""Walking back along kernels that only waited for one another, compiled."""

from __future__ import annotations

from tracer.machine_code import kept_loop


@kept_loop("int64", "int64", "int64[:]", "int64[:]", "int64[:]")
def chain(kernel, stop, before, begins, found):
    """Fill in a kernel and those it waited for, one after another, to the first that begins by ``stop`` or waited for
    something else; returns how many."""
    found[0] = kernel
    count = 1
    while before[kernel] >= 0 and begins[kernel] > stop:
        kernel = before[kernel]
        found[count] = kernel
        count += 1
    return count
