# mypy: disable-error-code="no-untyped-def"
"""``gaps.find_gaps``' inner loop, compiled."""

from __future__ import annotations

from tracer.graph import OpKind
from tracer.machine_code import kept_loop

OPERATION = int(OpKind.OPERATION)
"""Compiled code knows plain numbers only."""


@kept_loop("int8[:]", "int32[:]", "int64[:]", "int64[:]", "int32[:]", "int64[:]", "int64[:]", "int32[:]", "int64[:]",
           "int32[:]", "int64[:]", "int64[:]")
def gaps_between(kind, op_thread, op_start, op_end, call_thread, call_start, call_ns, mark_thread, mark_at,
                 thread, start, duration):
    """Write where a thread does nothing between two neighbours; returns how often that is.

    Args:
        kind, op_thread, op_start, op_end: operations, by thread and start; annotations among them are no work.
        call_thread, call_start, call_ns: calls likewise, with their lengths.
        mark_thread, mark_at: marks without length likewise.
        thread, start, duration: room for a gap after each of them.
    """
    op, call, mark, found = 0, 0, 0, 0
    now, reached = -2, 0
    while True:
        while op < kind.shape[0] and kind[op] != OPERATION:
            op += 1
        which = -1
        of, begin = 0, 0
        if op < kind.shape[0]:
            which, of, begin = 0, op_thread[op], op_start[op]
        if call < call_thread.shape[0] and (which < 0 or call_thread[call] < of or (
                call_thread[call] == of and call_start[call] < begin)):
            which, of, begin = 1, call_thread[call], call_start[call]
        if mark < mark_thread.shape[0] and (which < 0 or mark_thread[mark] < of or (
                mark_thread[mark] == of and mark_at[mark] < begin)):
            which, of, begin = 2, mark_thread[mark], mark_at[mark]
        if which < 0:
            return found
        end = begin
        if which == 0:
            end = op_end[op]
            op += 1
        elif which == 1:
            end += call_ns[call]
            call += 1
        else:
            mark += 1
        if of != now:
            now, reached = of, end
            continue
        if begin > reached:
            thread[found], start[found], duration[found] = of, reached, begin - reached
            found += 1
        reached = max(reached, end)
