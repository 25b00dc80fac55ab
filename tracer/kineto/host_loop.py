# mypy: disable-error-code="no-untyped-def, assignment"
"""``nesting``'s inner loops, compiled."""

from __future__ import annotations

from tracer.columns_loop import after, since
from tracer.graph import OpKind
from tracer.machine_code import kept_loop


@kept_loop("int32[:]", "int64[:]", "int64[:]", "int32[:]", "int32[:]", "int32[:]", "int64[:]", "int64")
def nest_rows(thread, start, end, parent, depth, open_row, open_end, rounding):
    """Fill in parents and depths, and clamp ends; returns how many were clamped.

    The open events are a stack, innermost last; the first entry of ``open_row`` and ``open_end``, which stands for "no
    parent" and never ends, is given.
    """
    top, clamped = 0, 0
    for row in range(thread.shape[0]):
        if row > 0 and thread[row] != thread[row - 1]:
            top = 0
        begin, last = start[row], end[row]
        # An event without duration at its neighbour's very end was called by it: 3–4% of the ops of the DLRM traces.
        while open_end[top] < begin or (open_end[top] == begin and last > begin):
            top -= 1
        while last > open_end[top]:
            clamped += 1
            inside, outside = open_end[top] - begin, last - open_end[top]
            if inside <= rounding and outside > inside and begin > start[open_row[top]]:
                end[open_row[top]] = begin  # neighbours that overlap by rounding
                top -= 1
            else:
                last = open_end[top]
                end[row] = last
        parent[row], depth[row] = open_row[top], top
        top += 1
        open_row[top], open_end[top] = row, last
    return clamped


@kept_loop("int32[:]", "int64[:]", "int64[:]", "int32[:]", "int64[:]", "int64[:]", "int32[:]", "int32[:]", "int64",
           inner=(after, since))
def rows_around(thread, at, until, rows_thread, rows_start, rows_end, parent, found, most):
    """Find the innermost row around each query (-1: none); returns how many lie further up than ``most`` levels, of
    which ``found`` is the row reached.

    Args:
        thread, at, until: the queries, best by thread and time.
        rows_thread, rows_start, rows_end, parent: the nested rows.
        found: room for the rows found.
        most: levels that are gone up.
    """
    low, high, place, now, further = 0, 0, 0, -2, 0
    for query in range(thread.shape[0]):
        if thread[query] != now or low == high:
            now = thread[query]
            low = after(rows_thread, 0, rows_thread.shape[0], now - 1)
            high = after(rows_thread, low, rows_thread.shape[0], now)
            place = low
        place = since(rows_start, low, high, at[query], place)
        row = place - 1 if place > low else -1
        level = 0
        while row >= 0 and rows_end[row] < until[query]:
            if level == most:
                further += 1
                break
            row = parent[row]
            level += 1
        found[query] = row
    return further




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
