# mypy: disable-error-code="no-untyped-def, assignment"
"""Tapes, compiled: places for their times, and playing them. See ``tape.Tape``; what an operation says is said here.

Each item and kernel is worked out once, from others before it. ``play`` keeps every time of one program and what it is
bound by, of items that were taken in by others too; ``play_variants`` works in ``LANES`` variants together, of which it
keeps a time only while something still waits for it: what is read of a tape is read once for all, times stay in the
processor's cache, and a row of them is a few vector registers.
"""

from __future__ import annotations

from graph_predictor.simulation.program import EndCause, KernelCause
from tracer.machine_code import kept_loop

(LAUNCH, QUEUED_LAUNCH, ITEM, KERNEL, LATER, LEFT, START, END, OPEN, SAME, SET, RUN, LEAST, FLOOR, STAGED,
 PART) = range(16)
"""Kinds of operations. ITEM: an item that follows the one before it and waits for nothing else until it begins; KERNEL:
one that waits for its call and the kernel before it alone; LAUNCH: an item and the kernel it launches; QUEUED_LAUNCH:
the same where an entry has to leave the launch queue. The others do one step: START, END, OPEN, SAME, SET and RUN set a
time; LATER, LEAST, FLOOR, STAGED and PART let one be no less than another; LEFT says when an entry and all before it
have left the queue."""
CODE, TO, TO_START, TO_LEFT, OF, OTHER, CALL, LEAVES, ROW, KERNEL_ROW, CAUSE, SOURCE = range(12)
"""Columns of an operation. TO, TO_START and TO_LEFT are times that it sets or raises, OF, OTHER, CALL and LEAVES times
that it reads (-1: none). ROW is one of work and cost, of a floor or a fraction; KERNEL_ROW one of durations; CAUSE and
SOURCE say what the time is bound by where this decides it. Of a KERNEL, OF is its call's end, CALL the call's start and
OTHER the kernel before it; of a launch OF is the item before, TO the item's end, TO_START the kernel's end, OTHER the
kernel before, CALL the entry that left before the one that LEAVES, and TO_LEFT when both have."""
COLUMNS, CONSTANTS = 12, 3
TAKEN = SOURCE
"""Of an operation that begins an item: how many items before it are taken in."""
OF_THE_LEFT = -2
"""A source: whatever left the queue last."""
LANES = 16
"""Variants that are worked out together."""
BY_QUEUE, BY_LAUNCH, BY_STREAM = int(EndCause.QUEUE), int(KernelCause.LAUNCH), int(KernelCause.STREAM)
_WHOLE, _EACH, _OPERATIONS = "int64[:]", "int64[:,:]", "int32[:,:]"


@kept_loop(_OPERATIONS, "boolean[:]", *[_WHOLE] * 5)
def place(operations, kept, until, first_of, next_of, free, at):
    """Give the times of a tape places, that of another one that nothing reads any more where there is one; those that
    are ``kept`` stay. Rewrites the operations, fills in ``at`` (-1 before), and returns how many places there are.
    ``until`` and ``first_of`` are -1 before."""
    count = operations.shape[0]
    for i in range(count):
        for column in range(TO, LEAVES + 1):
            if operations[i, column] >= 0:
                until[operations[i, column]] = i
    places, spare = 0, 0
    for i in range(count):
        for column in range(TO, OF):
            time = operations[i, column]
            if time >= 0 and at[time] < 0:
                if spare > 0:
                    spare -= 1
                    at[time] = free[spare]
                else:
                    at[time] = places
                    places += 1
                if not kept[time]:
                    next_of[time] = first_of[until[time]]
                    first_of[until[time]] = time
        time = first_of[i]
        while time >= 0:
            free[spare] = at[time]
            spare += 1
            time = next_of[time]
        for column in range(TO, LEAVES + 1):
            if operations[i, column] >= 0:
                operations[i, column] = at[operations[i, column]]
    return places


def _raise(to, time, by, why, times, cause, source):
    """Let a time be no less than another one."""
    if time > times[to]:
        times[to], cause[to], source[to] = time, why, by


def _begin(n, taken, time, row_of, work, cost, times, items):
    """Work through items that one has taken in; returns when it starts itself."""
    for other in range(n - taken, n):
        times[other] = time + work[row_of[other]]
        time = times[other] + cost[row_of[other]]
        times[items + other] = time
    times[n] = time + work[row_of[n]]
    return times[n]


def _run(end, launched, free, first, call, before, duration, times, cause, source, kernels):
    """Work out a kernel that its call and the kernel before it let start; on a tie by the ``first`` that was known."""
    start = end - kernels
    if launched > free or (launched == free and first == BY_LAUNCH):
        times[start], cause[start], source[start] = launched, BY_LAUNCH, call
    else:
        times[start], cause[start], source[start] = free, BY_STREAM, before
    times[end] = times[start] + duration


@kept_loop(_OPERATIONS, _EACH, "int64", "int64", *[_WHOLE] * 5, "float64[:]", _WHOLE, "int8[:]", "int32[:]",
           inner=(_raise, _begin, _run))
def play(operations, constants, items, kernels, row_of, work, cost, duration, floor, fraction, times, cause, source):
    """Work out all times of one program, and what each is bound by, of a tape whose times have no places. Where nothing
    is said of a time, ``cause`` (0 before) is the item before on its thread, or its own cost, and ``source`` -1."""
    first_end = 2 * items + kernels
    for i in range(operations.shape[0]):
        code, to, of, row, why, by = (operations[i, CODE], operations[i, TO], operations[i, OF], operations[i, ROW],
                                      operations[i, CAUSE], operations[i, SOURCE])
        other = operations[i, OTHER]
        if code in (QUEUED_LAUNCH, LAUNCH):
            n = to - items
            start = _begin(n, operations[i, TAKEN], times[of], row_of, work, cost, times, items)
            end = start + cost[row_of[n]]
            if code == QUEUED_LAUNCH:
                left, before, leaves = operations[i, TO_LEFT], operations[i, CALL], operations[i, LEAVES]
                if times[before] > times[leaves]:
                    times[left], source[left] = times[before], source[before]
                else:
                    times[left], source[left] = times[leaves], leaves - first_end
                if times[left] + constants[i, 0] > end:
                    end = times[left] + constants[i, 0]
                    cause[to], source[to] = BY_QUEUE, source[left]
            times[to] = end
            _run(operations[i, TO_START], max(end + constants[i, 1], start), times[other] + constants[i, 2], BY_STREAM,
                 n, other - first_end, duration[operations[i, KERNEL_ROW]], times, cause, source, kernels)
        elif code == ITEM:
            n = to - items
            times[to] = _begin(n, operations[i, TAKEN], times[of], row_of, work, cost, times, items) + cost[row_of[n]]
        elif code == KERNEL:
            _run(to, max(times[of] + constants[i, 1], times[operations[i, CALL]]), times[other] + constants[i, 2], why,
                 of - items, other - first_end, duration[operations[i, KERNEL_ROW]], times, cause, source, kernels)
        elif code == LATER:
            _raise(to, times[of] + constants[i, 0], source[of] if by == OF_THE_LEFT else by, why, times, cause, source)
        elif code == LEFT:
            # Entries leave in order: each together with the last to end of those up to it.
            if times[of] > times[other]:
                times[to], source[to] = times[of], source[of]
            else:
                times[to], source[to] = times[other], by
        elif code == RUN:
            times[to] = times[of] + duration[operations[i, KERNEL_ROW]]
        elif code == START:
            _begin(to, operations[i, TAKEN], times[of], row_of, work, cost, times, items)
        elif code == OPEN:
            _begin(to, operations[i, TAKEN], constants[i, 0], row_of, work, cost, times, items)
        elif code == END:
            times[to] = times[of] + cost[row_of[of]]
        elif code == LEAST:
            _raise(to, constants[i, 0], by, why, times, cause, source)
        elif code == FLOOR:
            _raise(to, floor[row], by, why, times, cause, source)
        elif code == STAGED:
            _raise(to, max(times[of] + constants[i, 0] - duration[operations[i, KERNEL_ROW]], times[other]), by, why,
                   times, cause, source)
        elif code == PART:
            _raise(to, times[of] + int(fraction[row] * (times[other] - times[of])) + constants[i, 0], by, why, times,
                   cause, source)
        else:
            times[to] = times[of] if code == SAME else constants[i, 0]
            cause[to], source[to] = why, by
    return operations.shape[0]


def _item(of, row, to, work, cost, before, end):
    """Fill in the end of an item that follows the one before it."""
    for v in range(LANES):
        end[to, v] = before[of, v] + work[row, v] + cost[row, v]


def _sum(of, row, to, adds, before, found):
    """Fill in a row that is another one and what is added to it."""
    for v in range(LANES):
        found[to, v] = before[of, v] + adds[row, v]


def _later(to, of, lag, before, found):
    """Let a row be no less than another one and a lag."""
    for v in range(LANES):
        found[to, v] = max(found[to, v], before[of, v] + lag)


def _larger(to, one, other, before, found):
    """Fill in a row that is the larger of two."""
    for v in range(LANES):
        found[to, v] = max(before[one, v], before[other, v])


def _kernel(to, call, call_start, other, row, latency, gap, duration, before, found):
    """Fill in the end of a kernel that waits for its call and the kernel before it."""
    for v in range(LANES):
        launched = max(before[call, v] + latency, before[call_start, v])
        found[to, v] = max(launched, before[other, v] + gap) + duration[row, v]


def _launch(to, kernel, of, other, row, kernel_row, latency, gap, work, cost, duration, before, end, kernel_end):
    """Fill in the ends of an item and of the kernel it launches."""
    for v in range(LANES):
        start = before[of, v] + work[row, v]
        done = start + cost[row, v]
        end[to, v] = done
        kernel_end[kernel, v] = max(max(done + latency, start), before[other, v] + gap) + duration[kernel_row, v]


def _queued_launch(to, kernel, left, of, other, left_before, leaves, row, kernel_row, returns, latency, gap, work,
                   cost, duration, before, end, kernel_end, gone):
    """Fill in the same where an entry has to leave the queue before the item returns, and when it has."""
    for v in range(LANES):
        start = before[of, v] + work[row, v]
        room = max(before[left_before, v], before[leaves, v])
        gone[left, v] = room
        done = max(start + cost[row, v], room + returns)
        end[to, v] = done
        kernel_end[kernel, v] = max(max(done + latency, start), before[other, v] + gap) + duration[kernel_row, v]


@kept_loop(_OPERATIONS, *[_EACH] * 5, "float64[:]", _EACH,
           inner=(_item, _sum, _later, _larger, _kernel, _launch, _queued_launch), apart=True)
def play_variants(operations, constants, work, cost, duration, floor, fraction, times):
    """Work out the times of ``LANES`` variants, [places, LANES], of rows of work, cost, durations and floors, [rows,
    LANES]."""
    for i in range(operations.shape[0]):
        code, to, start, of, other, call, row, kernel = (
            operations[i, CODE], operations[i, TO], operations[i, TO_START], operations[i, OF], operations[i, OTHER],
            operations[i, CALL], operations[i, ROW], operations[i, KERNEL_ROW])
        lag = constants[i, 0]
        if code == QUEUED_LAUNCH:
            _queued_launch(to, start, operations[i, TO_LEFT], of, other, call, operations[i, LEAVES], row, kernel, lag,
                           constants[i, 1], constants[i, 2], work, cost, duration, times, times, times, times)
        elif code == LAUNCH:
            _launch(to, start, of, other, row, kernel, constants[i, 1], constants[i, 2], work, cost, duration, times,
                    times, times)
        elif code == ITEM:
            if start >= 0:
                _sum(of, row, start, work, times, times)
                _sum(start, row, to, cost, times, times)
            else:
                _item(of, row, to, work, cost, times, times)
        elif code == KERNEL:
            _kernel(to, of, call, other, kernel, constants[i, 1], constants[i, 2], duration, times, times)
        elif code == LATER:
            _later(to, of, lag, times, times)
        elif code == LEFT:
            _larger(to, of, other, times, times)
        elif code == RUN:
            _sum(of, kernel, to, duration, times, times)
        elif code == START:
            _sum(of, row, to, work, times, times)
        elif code == END:
            _sum(of, row, to, cost, times, times)
        elif code == FLOOR:
            _later(to, row, 0, floor, times)
        elif code == STAGED:
            for v in range(LANES):
                ready = max(times[of, v] + lag - duration[kernel, v], times[other, v])
                times[to, v] = max(times[to, v], ready)
        elif code == PART:
            for v in range(LANES):
                part = int(fraction[row] * (times[other, v] - times[of, v]))
                times[to, v] = max(times[to, v], times[of, v] + part + lag)
        else:
            for v in range(LANES):
                if code == OPEN:
                    times[to, v] = lag + work[row, v]
                elif code == SAME:
                    times[to, v] = times[of, v]
                elif code == SET:
                    times[to, v] = lag
                else:
                    times[to, v] = max(times[to, v], lag)
    return operations.shape[0]
