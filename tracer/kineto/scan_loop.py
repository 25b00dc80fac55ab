# mypy: disable-error-code="no-untyped-def, no-untyped-call"
"""``scanner.Scanner``'s loop, compiled: the text of events → numbers and codes of texts, without an object for either.

What it takes it takes only from valid JSON whose fields have the types of ``events.Event``; at the first byte that is
anything else it gives up (``ODD``), and the text goes through ``salvage``.
"""

from __future__ import annotations

import numpy as np

from tracer.machine_code import kept_loop

DONE, ODD, MORE_EVENTS, MORE_TOKENS = 0, 1, 2, 3
"""What the loop returns: all was read; the text is odd; more room is needed for events, or for tokens."""
AT, EVENTS, TOKENS, POOL, SLOW, SECRET = 0, 1, 2, 3, 4, 5
"""Places in ``state``: of the text read, events, tokens, bytes of tokens, times that Python has to read, and an odd
number that the hashes of tokens depend on. It is secret, or a file's texts could be made to collide."""
TIME, ARGS, INTEGER, LENIENT, TEXT, TEXT_OR_NULL, NAMED, SCALAR, RAW, CHECKED, CHECKED_TEXT = range(11)
"""What is done with a field: see ``scanner``."""
AS_TEXT, AS_SCALAR, AS_JSON = 0, 1, 2
"""Kinds of tokens: those of different kinds have different codes."""
LIMIT_US = 9_000_000_000_000_000
"""``events.MAX_US``."""
# A byte's lowest and highest bit, eight times; the characters below likewise.
_ONES, _HIGHS = 0x0101010101010101, -0x7F7F7F7F7F7F7F80
_QUOTES, _BACKSLASHES, _SPACES = 0x2222222222222222, 0x5C5C5C5C5C5C5C5C, 0x2020202020202020  # as above


def word(text, at):
    """Eight bytes as a number (one load, once compiled)."""
    place = np.uintp(at)
    return (np.int64(text[place]) | np.int64(text[place + np.uintp(1)]) << 8
            | np.int64(text[place + np.uintp(2)]) << 16 | np.int64(text[place + np.uintp(3)]) << 24
            | np.int64(text[place + np.uintp(4)]) << 32 | np.int64(text[place + np.uintp(5)]) << 40
            | np.int64(text[place + np.uintp(6)]) << 48 | np.int64(text[place + np.uintp(7)]) << 56)


def byte(text, at):
    """One byte; ``at`` is not negative."""
    return np.int64(text[np.uintp(at)])


def blanks(text, at, end):
    """Position of the first byte that is no white space."""
    while at < end:
        this = byte(text, at)
        if this > 32 or not (this == 32 or this == 10 or this == 13 or this == 9):
            return at
        at += 1
    return at


def surrogate(text, at, end):
    """Of a ``\\uXXXX`` at ``at``: 1 and 2 for the first and second half of a character beyond 16 bits, else 0.

    -1 where there is none.
    """
    if at + 6 > end or byte(text, at) != 92 or byte(text, at + 1) != 117:
        return -1
    for place in range(at + 2, at + 6):
        if not (48 <= byte(text, place) <= 57 or 97 <= byte(text, place) | 32 <= 102):
            return -1
    if byte(text, at + 2) | 32 != 100 or byte(text, at + 3) < 56:
        return 0
    return 1 if byte(text, at + 3) | 32 <= 98 else 2


def string_end(text, at, end):
    """Position of the quote that ends the string whose first byte is at ``at``; -1 if it is invalid or has none."""
    while True:
        while at + 8 <= end:
            these = word(text, at)
            quote, back = these ^ _QUOTES, these ^ _BACKSLASHES
            if ((((quote - _ONES) & ~quote) | ((back - _ONES) & ~back) | ((these - _SPACES) & ~these)) & _HIGHS) != 0:
                break
            at += 8
        while True:
            if at >= end:
                return -1
            this = byte(text, at)
            if this == 34:
                return at
            if this < 32:
                return -1
            if this == 92:
                break
            at += 1
        if at + 1 >= end:
            return -1
        this = byte(text, at + 1)
        if this == 117:  # u
            half = surrogate(text, at, end)
            if half == 1 and surrogate(text, at + 6, end) == 2:
                at += 12
            elif half == 0:
                at += 6
            else:
                return -1
        elif this == 34 or this == 92 or this == 47 or this == 98 or this == 102 or this == 110 or this == 114 \
                or this == 116:
            at += 2
        else:
            return -1


def number_end(text, at, end):
    """Position after a number; its negative where the number is no integer; 0 where it is invalid."""
    if at < end and byte(text, at) == 45:
        at += 1
    if at >= end:
        return 0
    first = byte(text, at)
    if not 48 <= first <= 57:
        return 0
    at += 1
    if first == 48:
        if at < end and 48 <= byte(text, at) <= 57:
            return 0
    else:
        while at < end and 48 <= byte(text, at) <= 57:
            at += 1
    whole = True
    if at < end and byte(text, at) == 46:
        whole = False
        at += 1
        before = at
        while at < end and 48 <= byte(text, at) <= 57:
            at += 1
        if at == before:
            return 0
    if at < end and byte(text, at) | 32 == 101:
        whole = False
        at += 1
        if at < end and (byte(text, at) == 43 or byte(text, at) == 45):
            at += 1
        before = at
        while at < end and 48 <= byte(text, at) <= 57:
            at += 1
        if at == before:
            return 0
    return at if whole else -at


def literal_end(text, at, end):
    """Position after ``true``, ``false`` or ``null``; 0 where it is none of them."""
    if at + 4 <= end:
        a, b, c, d = byte(text, at), byte(text, at + 1), byte(text, at + 2), byte(text, at + 3)
        if (a == 110 and b == 117 and c == 108 and d == 108) or (a == 116 and b == 114 and c == 117 and d == 101):
            return at + 4
        if a == 102 and b == 97 and c == 108 and d == 115 and at + 5 <= end and byte(text, at + 4) == 101:
            return at + 5
    return 0


def value_end(text, at, end, stack):
    """Position after any value; 0 where it is invalid or nested more deeply than ``stack`` is long."""
    depth = 0
    while True:
        if at >= end:
            return 0
        this = byte(text, at)
        opened = False
        if this == 91 or this == 123:
            if depth == stack.shape[0]:
                return 0
            stack[depth] = this
            depth += 1
            at = blanks(text, at + 1, end)
            if at >= end:
                return 0
            if byte(text, at) == this + 2:
                depth -= 1
                at += 1
            else:
                opened = True
        elif this == 34:
            at = string_end(text, at + 1, end) + 1
            if at == 0:
                return 0
        elif this == 45 or 48 <= this <= 57:
            at = abs(number_end(text, at, end))
            if at == 0:
                return 0
        else:
            at = literal_end(text, at, end)
            if at == 0:
                return 0
        while not opened:
            if depth == 0:
                return at
            at = blanks(text, at, end)
            if at >= end:
                return 0
            this = byte(text, at)
            if this == 44:
                at = blanks(text, at + 1, end)
                opened = True
            elif this == stack[depth - 1] + 2:
                depth -= 1
                at += 1
            else:
                return 0
        if stack[depth - 1] == 123:
            if at >= end or byte(text, at) != 34:
                return 0
            at = string_end(text, at + 1, end) + 1
            if at == 0:
                return 0
            at = blanks(text, at, end)
            if at >= end or byte(text, at) != 58:
                return 0
            at = blanks(text, at + 1, end)


def token_hash(text, begin, last, kind, secret):
    """Hash of the token ``text[begin:last]``. How texts that differ differ in it depends on ``secret``: a product alone
    would show in the same bits what they differ by in their highest ones."""
    mixed = (kind + 1) * secret + (last - begin)
    at = begin
    while at + 8 <= last:
        mixed = (mixed ^ word(text, at)) * secret
        mixed = (mixed ^ mixed >> 32) * secret
        at += 8
    rest = 0
    while at < last:
        rest = rest << 8 | byte(text, at)
        at += 1
    mixed = (mixed ^ rest) * secret
    mixed = (mixed ^ mixed >> 32) * secret
    return mixed ^ mixed >> 32


def token_code(text, begin, last, kind, tokens, slots, pool, state):
    """Code of the token ``text[begin:last]``, a new one if it was not there; -1 where there is no room for it."""
    mixed = token_hash(text, begin, last, kind, state[SECRET])
    mask = slots.shape[0] - 1
    slot = mixed & mask
    while slots[np.uintp(slot)] >= 0:
        code = slots[np.uintp(slot)]
        if tokens[0, code] == mixed and tokens[2, code] == last - begin and tokens[3, code] == kind:
            place, at = tokens[1, code], begin
            while at + 8 <= last and word(text, at) == word(pool, place):
                at += 8
                place += 8
            while at < last and byte(text, at) == byte(pool, place):
                at += 1
                place += 1
            if at == last:
                return code
        slot = (slot + 1) & mask
    code, place = state[TOKENS], state[POOL]
    if code == tokens.shape[1] or 2 * code > mask or place + last - begin > pool.shape[0]:
        return -1
    slots[np.uintp(slot)] = code
    tokens[0, code], tokens[1, code], tokens[2, code], tokens[3, code] = mixed, place, last - begin, kind
    for at in range(begin, last):
        pool[place + at - begin] = text[at]
    state[TOKENS] = code + 1
    state[POOL] = place + last - begin
    return code


def integer_of(text, at, last):
    """The integer of valid digits; -1 where it does not fit 64 bits, as for ``events.integer``."""
    negative = byte(text, at) == 45
    if negative:
        at += 1
    if last - at > 18:
        if last - at > 19:
            return -1
        # One digit more than always fits: it fits where the first eighteen leave room for it.
        head = 0
        for place in range(at, last - 1):
            head = head * 10 + byte(text, place) - 48
        tail = byte(text, last - 1) - 48
        if head > 922337203685477580 or (head == 922337203685477580 and tail > (8 if negative else 7)):
            return -1
        return -head * 10 - tail if negative else head * 10 + tail
    value = 0
    while at < last:
        value = value * 10 + byte(text, at) - 48
        at += 1
    return -value if negative else value


@kept_loop("uint8[:]", "int64", "int64[:]", "int64[:,:]", "int64[:,:]", "uint8[:]", "int64[:,:]", "int64[:]",
           "int64[:]", "int64[:,:]", "int32[:,:]", "int64[:,:]", "boolean[:,:]", "int64[:,:]", "int64[:,:]",
           "int64[:,:]", "int64[:]", "uint8[:]", "int64[:]",
           inner=(word, byte, blanks, surrogate, string_end, number_end, literal_end, value_end, token_hash,
                  token_code, integer_of))
def scan_events(text, end, state, key_slots, keys, key_bytes, fields, number_default, code_default, numbers, codes,
                times, timed, spans, slow, tokens, slots, pool, stack):
    """Read events from ``state[AT]`` on, separated by commas, into rows of columns; returns how it ended.

    Args:
        text, end: the text, and where it ends.
        state: where the loop is, see ``AT`` and the others; brought up to date.
        key_slots: a hash table of each level (an event's own keys, its arguments').
        keys: of each key: where in ``key_bytes`` it begins, its length.
        fields: of each key: what is done with it (``TIME`` and the others), its column.
        number_default, code_default: what absent numbers and codes are. Columns are filled with it when their field is
            first met, of which the last two places of ``fields`` keep account.
        numbers, codes: columns by rows.
        times, timed: nanoseconds of start and duration by rows, and whether they are valid.
        spans: where each row's arguments begin and end; 0 where it has none.
        slow: of each time that is no plain number: row, which, begin, end.
        tokens, slots, pool: distinct texts: hash, place, length, kind; the hash table; the bytes.
        stack: room for open brackets.
    """
    at, row = state[AT], state[EVENTS]
    capacity = spans.shape[1]
    while True:
        at = blanks(text, at, end)
        if at >= end:
            state[AT], state[EVENTS] = at, row
            return DONE if row == 0 else ODD  # a comma without an event after it
        state[AT], state[EVENTS] = at, row
        if row == capacity:
            return MORE_EVENTS
        if byte(text, at) != 123:
            return ODD
        for which in range(2):
            times[which, row] = 0
            timed[which, row] = False
            spans[which, row] = 0
        slow_before = state[SLOW]
        level = 0
        at = blanks(text, at + 1, end)
        if at >= end:
            return ODD
        member = byte(text, at) != 125
        opened = True
        while opened:
            if member:
                if at >= end or byte(text, at) != 34:
                    return ODD
                begin = at + 1
                mixed, at = 0, begin
                while at < end:
                    this = byte(text, at)
                    if this == 34:
                        break
                    if this == 92 or this < 32:
                        return ODD
                    mixed = mixed * 31 + this
                    at += 1
                if at >= end:
                    return ODD
                length = at - begin
                mixed ^= mixed >> 7
                mask = key_slots.shape[1] - 1
                slot = mixed & mask
                field = key_slots[level, slot]
                while field >= 0:
                    if keys[1, field] == length:
                        place = 0
                        while place < length and byte(text, begin + place) == byte(key_bytes, keys[0, field] + place):
                            place += 1
                        if place == length:
                            break
                    slot = (slot + 1) & mask
                    field = key_slots[level, slot]
                at = blanks(text, at + 1, end)
                if at >= end or byte(text, at) != 58:
                    return ODD
                at = blanks(text, at + 1, end)
                if at >= end:
                    return ODD
                this = byte(text, at)
                member = False
                if field < 0:
                    at = value_end(text, at, end, stack)
                    if at == 0:
                        return ODD
                else:
                    action, column = fields[0, field], fields[1, field]
                    begin = at
                    if action in (INTEGER, LENIENT):
                        if fields[2, field] == 0:
                            fields[2, field] = 1
                            for place in range(capacity):
                                numbers[column, place] = number_default[column]
                        if this == 34 and action == LENIENT:
                            begin += 1
                            at = string_end(text, begin, end)
                            if at <= begin or at - begin > 19:
                                return ODD
                            first = begin + 1 if byte(text, begin) == 45 else begin
                            if first == at:
                                return ODD
                            for place in range(first, at):
                                if not 48 <= byte(text, place) <= 57:
                                    return ODD
                            numbers[column, row] = integer_of(text, begin, at)
                            at += 1
                        else:
                            at = number_end(text, at, end)
                            if at <= 0 or at - begin > 1000:
                                return ODD
                            numbers[column, row] = integer_of(text, begin, at)
                    elif action == TIME:
                        # Up to 16 digits, a point, as many digits as there are: the fourth after it rounds.
                        negative = this == 45
                        if negative:
                            at += 1
                        value, first = 0, at
                        while at < end and 48 <= byte(text, at) <= 57 and at - first <= 16:
                            value = value * 10 + byte(text, at) - 48
                            at += 1
                        whole = at - first
                        plain = 0 < whole <= 16 and (whole == 1 or byte(text, first) != 48)
                        good = value <= LIMIT_US
                        value *= 1000
                        if plain and at < end and byte(text, at) == 46:
                            at += 1
                            first, weight = at, 100
                            while at < end and 48 <= byte(text, at) <= 57:
                                place = at - first
                                digit = byte(text, at) - 48
                                if place < 3:
                                    value += digit * weight
                                    weight //= 10
                                elif place == 3 and digit >= 5:
                                    value += 1
                                at += 1
                            plain = at > first
                        if plain and at < end:
                            follows = byte(text, at)
                            plain = follows == 44 or follows == 125 or follows == 32 or follows == 10 \
                                or follows == 13 or follows == 9
                        if plain and at < end:
                            good = good and value <= LIMIT_US * 1000
                            times[column, row] = (-value if negative else value) if good else 0
                            timed[column, row] = good
                        else:
                            at = value_end(text, begin, end, stack)
                            if at == 0:
                                return ODD
                            if state[SLOW] == slow.shape[1]:
                                state[SLOW] = slow_before
                                return MORE_EVENTS
                            which = state[SLOW]
                            slow[0, which], slow[1, which], slow[2, which], slow[3, which] = row, column, begin, at
                            state[SLOW] = which + 1
                    elif action == ARGS:
                        if spans[0, row] != 0:
                            return ODD  # a second one: it replaces the first
                        if this == 123:
                            spans[0, row] = at
                            level = 1
                            at = blanks(text, at + 1, end)
                            if at >= end:
                                return ODD
                            member = byte(text, at) != 125
                        else:
                            at = literal_end(text, at, end)
                            if at == 0 or this != 110:
                                return ODD
                    elif action in (CHECKED, CHECKED_TEXT):
                        if action == CHECKED_TEXT and this != 34:
                            return ODD
                        if this == 123:
                            return ODD
                        at = value_end(text, at, end, stack)
                        if at == 0:
                            return ODD
                    else:
                        kind = AS_SCALAR
                        if this == 34 and action != RAW:
                            if action in (TEXT, TEXT_OR_NULL):
                                kind = AS_TEXT
                            at = string_end(text, at + 1, end) + 1
                        elif action == RAW:
                            kind = AS_JSON
                            at = value_end(text, at, end, stack)
                        elif this == 110 and action != TEXT:
                            at = literal_end(text, at, end)
                        elif action == NAMED:
                            at = number_end(text, at, end)
                        elif action == SCALAR:
                            at = abs(number_end(text, at, end))
                        else:
                            return ODD
                        if at <= 0:
                            return ODD
                        if fields[2, field] == 0:
                            fields[2, field] = 1
                            for place in range(capacity):
                                codes[column, place] = code_default[column]
                        code = token_code(text, begin, at, kind, tokens, slots, pool, state)
                        if code < 0:
                            state[SLOW] = slow_before
                            return MORE_TOKENS
                        codes[column, row] = code
            while opened and not member:
                at = blanks(text, at, end)
                if at >= end:
                    return ODD
                this = byte(text, at)
                if this == 44:
                    at = blanks(text, at + 1, end)
                    member = True
                elif this == 125:
                    at += 1
                    if level == 1:
                        spans[1, row] = at
                        level = 0
                    else:
                        opened = False
                else:
                    return ODD
        row += 1
        at = blanks(text, at, end)
        if at >= end:
            state[AT], state[EVENTS] = at, row
            return DONE
        if byte(text, at) != 44:
            return ODD
        at += 1


@kept_loop("int64[:,:]", "int64[:]", "uint8[:]", "int64", "int64", inner=(word, byte, token_hash))
def place_tokens(tokens, slots, pool, count, secret):
    """Put the first ``count`` tokens into empty ``slots``, by hashes that are written anew."""
    mask = slots.shape[0] - 1
    for code in range(count):
        begin = tokens[1, code]
        mixed = token_hash(pool, begin, begin + tokens[2, code], tokens[3, code], secret)
        tokens[0, code] = mixed
        slot = mixed & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = code
    return count
