# mypy: disable-error-code="no-untyped-def"
"""Sums by group, compiled: groups of rows (steps) are added up one after the other in one room, see ``grouping``."""

from __future__ import annotations

from tracer.machine_code import kept_loop

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
