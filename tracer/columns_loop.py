# mypy: disable-error-code="no-untyped-def, assignment"
"""Compiled loops over columns: searches in ascending times, sums by group, what intervals cover; see ``columns``."""

from __future__ import annotations

from tracer.machine_code import kept_loop


def after(times, low, high, time):
    """First place in [low, high) of ascending times that is later than a time."""
    while low < high:
        middle = (low + high) // 2
        if times[middle] <= time:
            low = middle + 1
        else:
            high = middle
    return low


def since(times, low, high, time, at):
    """As ``after``, from a place that is probably near: the last answer of queries that mostly ascend."""
    if at <= low or at > high or times[at - 1] > time:
        return after(times, low, high, time)
    step = 1
    while at + step <= high and times[at + step - 1] <= time:
        at += step
        step *= 2
    return after(times, at, min(at + step, high), time)




COUNT, GROUP = range(2)
"""Places of a state: of rows handed over, and of the group to go on with."""


def add(slot, column, amount, room, there):
    """Add to a slot's sum, and note that something was added to the slot."""
    room[slot, column] += amount
    there[slot >> 6] |= 1 << (slot & 63)


def hand_over(group, room, there, state, groups, slots, sums):
    """Make rows of what was added up, in the order of slots, and leave the room empty."""
    at = state[COUNT]
    for word in range(there.shape[0]):
        bits = there[word]
        if bits != 0:
            there[word] = 0
            for bit in range(64):
                if (bits >> bit) & 1:
                    slot = 64 * word + bit
                    groups[at], slots[at] = group, slot
                    for column in range(room.shape[1]):
                        sums[at, column] = room[slot, column]
                        room[slot, column] = 0
                    at += 1
    state[COUNT] = at


@kept_loop("int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:,:]", "int64[:]", "int64[:]", "int64[:]",
           "int64[:]", "int64[:,:]", inner=(add, hand_over))
def tally_rows(first, order, slot_of, amount, room, there, state, groups, slots, sums):
    """Count rows and add amounts up by group and slot; returns how many sums there are.

    Args:
        first, order: the rows of group ``n`` are ``order[first[n]:first[n + 1]]``.
        slot_of, amount: of each row.
        room, there: zeros, two for each slot, and a bit for each.
        state: zeros.
        groups, slots, sums: room for the groups, slots, and count and amount of the sums.
    """
    for group in range(first.shape[0] - 1):
        for at in range(first[group], first[group + 1]):
            row = order[at]
            add(slot_of[row], 0, 1, room, there)
            add(slot_of[row], 1, amount[row], room, there)
        hand_over(group, room, there, state, groups, slots, sums)
    return state[COUNT]


@kept_loop("int32[:]", "boolean[:]", "int64[:]", "int64[:]")
def place_rows(number, chosen, first, order):
    """Lay the chosen rows out by their numbers, which begin at -1; returns how many there are.

    Args:
        number, chosen: of each row.
        first: zeros, three more than there are numbers from 0 on; afterwards rows of ``n`` begin at ``first[n + 1]``.
        order: room for the rows.
    """
    for row in range(number.shape[0]):
        if chosen[row]:
            first[number[row] + 3] += 1
    for at in range(3, first.shape[0]):
        first[at] += first[at - 1]
    found = 0
    for row in range(number.shape[0]):
        if chosen[row]:
            place = first[number[row] + 2]
            order[place] = row
            first[number[row] + 2] = place + 1
            found += 1
    return found




UNSORTED = -2**62
"""What ``cover`` returns of intervals that are not in the order of their starts."""


def _before(time, place, joined, count):
    """Return the last joined interval that begins no later than a time, looking on from ``place``; -1 for none."""
    while place + 1 < count and joined[0, place + 1] <= time:
        place += 1
    while place >= 0 and joined[0, place] > time:
        place -= 1
    return place


def _until(time, place, joined):
    """Return how much is covered until a time, in or behind the joined interval ``place``."""
    if place < 0:
        return 0
    return joined[2, place] + min(time, joined[1, place]) - joined[0, place]


@kept_loop("int64[:]", "int64[:]", "int64[:,:]", "int64[:]", "int64[:]", "int64[:]", inner=(_before, _until))
def cover(start, end, joined, asked_start, asked_end, found):
    """Join intervals that are in the order of their starts, and fill in how much of each asked one they cover. Returns
    how much they cover in all. ``joined``, [3, intervals], has room for starts, ends and what is covered before each.
    """
    count, total, reached = 0, 0, 0
    for i in range(start.shape[0]):
        if i > 0 and start[i] < start[i - 1]:
            return UNSORTED
        if i == 0 or start[i] > reached:
            if count > 0:
                joined[1, count - 1] = reached
                total += reached - joined[0, count - 1]
            joined[0, count], joined[2, count] = start[i], total
            count += 1
        if i == 0 or end[i] > reached:
            reached = end[i]
    if count > 0:
        joined[1, count - 1] = reached
        total += reached - joined[0, count - 1]
    place = -1
    for i in range(asked_start.shape[0]):
        place = _before(asked_start[i], place, joined, count)
        last = _before(asked_end[i], place, joined, count)
        found[i] = _until(asked_end[i], last, joined) - _until(asked_start[i], place, joined)
    return total
