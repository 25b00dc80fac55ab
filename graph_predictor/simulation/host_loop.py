# mypy: disable-error-code="no-untyped-def"
"""``host_slices``'s inner loops, compiled."""

from __future__ import annotations

from tracer.columns_loop import after, since
from tracer.graph import OpKind
from tracer.machine_code import kept_loop

OPERATION = int(OpKind.OPERATION)
"""Compiled code knows plain numbers only."""
COUNT, QUERY = range(2)
"""Places of ``cut_queries``' state: of slices found, and of the query to go on with."""


@kept_loop("int8[:]", "int32[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]",
           "int64[:]")
def innermost_times(kind, thread, start, duration, open_row, open_end, of_thread, begins, ends, op):
    """Write the intervals in which each operation is the innermost one; returns how many there are.

    Args:
        kind, thread, start, duration: columns of ``ops``, by thread and start, outer ones first.
        open_row, open_end: room for the operations that are under way, innermost last.
        of_thread, begins, ends, op: room for two intervals an operation.
    """
    found, top, reached = 0, 0, 0
    rows = kind.shape[0]
    for row in range(rows + 1):
        if row < rows and (kind[row] != OPERATION or duration[row] <= 0):
            continue
        changes = row == rows or (top > 0 and thread[row] != thread[open_row[0]])
        while top > 0 and (changes or open_end[top - 1] <= start[row]):
            top -= 1
            if reached < open_end[top]:
                of_thread[found], begins[found], ends[found] = thread[open_row[top]], reached, open_end[top]
                op[found] = open_row[top]
                found += 1
                reached = open_end[top]
        if row == rows:
            break
        begin = start[row]
        if top > 0 and reached < begin:
            of_thread[found], begins[found], ends[found] = thread[row], reached, begin
            op[found] = open_row[top - 1]
            found += 1
        reached = begin
        open_row[top], open_end[top] = row, begin + duration[row]
        top += 1
    return found


@kept_loop("int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]",
           "int64[:]", "int64[:]", "int64[:]", inner=(after, since))
def cut_queries(thread, start, end, op, of_query, begins, until, state, query, found_op, found_start, found_ns):
    """Cut queried intervals of threads at the borders of others; returns how many queries are done.

    Of each query first the slices that lie in an interval, then those that lie in none (-1). Where there is no more
    room for slices it returns early, to be called again with more and the same ``state``.

    Args:
        thread, start, end, op: disjoint intervals by thread and start.
        of_query, begins, until: thread, start and end of each query.
        query, found_op, found_start, found_ns: room for slices.
    """
    room, many = query.shape[0], thread.shape[0]
    low, high, at, now = 0, 0, 0, -2
    for each in range(state[QUERY], of_query.shape[0]):
        if of_query[each] != now or low == high:
            now = of_query[each]
            low = after(thread, 0, many, now - 1)
            high = after(thread, low, many, now)
            at = low
        count, time, last = state[COUNT], begins[each], until[each]
        at = since(end, low, high, time, at)
        place = at
        while place < high and time < last and start[place] < last:
            if count == room:
                state[QUERY] = each
                return each
            begin, stop = max(start[place], time), min(end[place], last)
            query[count], found_op[count], found_start[count], found_ns[count] = each, op[place], begin, stop - begin
            count += 1
            place += 1
        before = time
        for covering in range(at, place + 1):
            begin = last if covering == place else max(start[covering], time)
            if begin > before:
                if count == room:
                    state[QUERY] = each
                    return each
                query[count], found_op[count], found_start[count], found_ns[count] = each, -1, before, begin - before
                count += 1
            if covering < place:
                before = min(end[covering], last)
        state[COUNT] = count
    state[QUERY] = of_query.shape[0]
    return of_query.shape[0]
