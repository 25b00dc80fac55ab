"""Alignment of operations: two windows of one program by names, or two steps by what makes pairs most alike.

``align_windows`` aligns two recordings of one program. The sequences are op names in program order. They agree almost
everywhere, but one may cover one iteration and the other forty, and a few tokens may be missing, extra or renamed. A
general longest-common-subsequence is quadratic; this is near-linear: find the diagonal most short runs of tokens agree
on, then walk it in both directions, resynchronising at each difference. It cannot weigh one pair against another.

``most_alike_pairs`` aligns two steps that may differ anywhere, by name, surroundings, module and sizes. Every way to
pair them counts: the classic dynamic programme (Needleman & Wunsch 1970) in a band around the diagonal, compiled.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tracer.arrays import Int64
from tracer.machine_code import kept_loop

# Runs of 24 operations rarely repeat within an iteration; shorter sequences use shorter runs.
_RUN = 24
# After a difference, six equal tokens in a row count as "in step again".
_RESYNC = 6
# A difference longer than this many tokens ends the walk (windows of 1.3 M events have ops by the 100,000).
_MAX_SKIP = 1 << 14
# Bounds the work on periodic sequences, where each run occurs in every iteration.
_MAX_PAIRS = 2_000_000
# Diagonals compared by their marks, best voted first: more than the iterations of any window seen.
_MAX_DIAGONALS = 512
_GOOD_VOTES = 0.8  # chosen: a share of the best diagonal's votes that repeats of a period still get
# Diagonals this close show the same alignment with a few tokens missing.
_DRIFT = 8


def align_windows(left: Int64, right: Int64, left_marks: Int64 | None = None,
                  right_marks: Int64 | None = None) -> Int64:
    """Return the position in ``right`` of each token of ``left``, -1 where it has no partner.

    Partners have equal tokens and keep their order. Marks are numbers that identify a token's iteration where both
    sequences come from one run (autograd's sequence number; -1 for none): they choose the diagonal of a periodic
    program, whose iterations all look alike. Without marks, or where they agree nowhere, the earliest of the best
    diagonals is taken.
    """
    partner = np.full(len(left), -1, dtype=np.int64)
    marks = (left_marks, right_marks) if left_marks is not None and right_marks is not None else None
    start = _start(left, right, marks)
    if start is None:
        return partner
    i, j = start
    _walk(left[i:].tolist(), right[j:].tolist(), i, j, 1, partner)
    _walk(left[:i][::-1].tolist(), right[:j][::-1].tolist(), i - 1, j - 1, -1, partner)
    return partner


def _start(left: Int64, right: Int64, marks: tuple[Int64, Int64] | None) -> tuple[int, int] | None:
    """Find a pair of positions on the best diagonal (left - right position); ``None`` where no tokens agree."""
    run = min(_RUN, len(left), len(right))
    while run > 0:
        at_left, at_right = _equal_runs(left, right, run)
        if len(at_left):
            break
        run //= 2
    else:
        return None
    diagonals, counts = np.unique(at_left - at_right, return_counts=True)
    # A missing token moves the rest of the program to a neighbouring diagonal: let those vote together.
    total = np.concatenate(([0], np.cumsum(counts)))
    votes = (total[np.searchsorted(diagonals, diagonals + _DRIFT, side="right")]
             - total[np.searchsorted(diagonals, diagonals - _DRIFT)])
    best = _marked(diagonals[np.argsort(-votes, kind="stable")[:_MAX_DIAGONALS]], *marks) if marks else None
    if best is None:
        # In a periodic program many diagonals do about as well near one place; the longest overlap does so overall.
        good = votes >= _GOOD_VOTES * votes.max()
        overlap = np.minimum(len(left), len(right) + diagonals) - np.maximum(diagonals, 0)
        middle = diagonals[np.argmax(np.where(good, overlap, -1))]
        inside = np.abs(diagonals - middle) <= _DRIFT
        best = int(diagonals[inside][np.argmax(counts[inside])])
    first = np.flatnonzero(at_left - at_right == best)[0]
    return int(at_left[first]), int(at_right[first])


def _marked(diagonals: Int64, left_marks: Int64, right_marks: Int64) -> int | None:
    """Return the diagonal on which most marks agree, if at least a quarter of those that face each other do."""
    best, best_agree = None, 0
    for diagonal in diagonals.tolist():
        low = max(diagonal, 0)
        high = min(len(left_marks), len(right_marks) + diagonal)
        ours, theirs = left_marks[low:high], right_marks[low - diagonal: high - diagonal]
        both = (ours >= 0) & (theirs >= 0)
        agree = int(np.count_nonzero(both & (ours == theirs)))
        if agree > best_agree and agree * 4 >= np.count_nonzero(both):
            best, best_agree = diagonal, agree
    return best


def _equal_runs(left: Int64, right: Int64, run: int) -> tuple[Int64, Int64]:
    """Return all (left, right) positions at which ``run`` tokens agree, thinned out on periodic sequences."""
    keys_left, keys_right = run_hashes(left, run), run_hashes(right, run)
    order = np.argsort(keys_left, kind="stable")
    ordered = keys_left[order]
    low = np.searchsorted(ordered, keys_right, side="left")
    count = np.searchsorted(ordered, keys_right, side="right") - low
    positions = np.flatnonzero(count)
    pairs = int(count[positions].sum())
    if pairs > _MAX_PAIRS:
        positions = positions[:: pairs // _MAX_PAIRS + 1]
    count = count[positions]
    at_right = np.repeat(positions, count)
    within = np.arange(len(at_right)) - np.repeat(np.cumsum(count) - count, count)
    return order[np.repeat(low[positions], count) + within], at_right


def run_hashes(tokens: Int64, run: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit hash of each run of so many tokens, [len(tokens) - run + 1]."""
    mixed = (tokens.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    result = np.zeros(len(tokens) - run + 1, dtype=np.uint64)
    for offset in range(run):
        result = result * np.uint64(0x100000001B3) + mixed[offset: offset + len(result)]
    return result


def _walk(left: list[int], right: list[int], left_at: int, right_at: int, sign: int, partner: Int64) -> None:
    """Pair tokens from the start of both lists on; at a difference skip as few tokens as bring them in step."""
    i = j = 0
    while i < len(left) and j < len(right):
        if left[i] == right[j]:
            partner[left_at + sign * i] = right_at + sign * j
            i += 1
            j += 1
            continue
        skip = _resync(left, right, i, j)
        if skip is None:
            return
        i += skip[0]
        j += skip[1]


def _resync(left: list[int], right: list[int], i: int, j: int) -> tuple[int, int] | None:
    """Return the fewest (tokens of left, tokens of right) to skip; ``None`` where they never get in step again."""
    reach = 64
    while True:
        need = min(_RESYNC, len(left) - i, len(right) - j)
        places: dict[tuple[int, ...], int] = {}
        for b in range(min(reach, len(right) - j)):
            places.setdefault(tuple(right[j + b: j + b + need]), b)
        best: tuple[int, int] | None = None
        for a in range(min(reach, len(left) - i)):
            if best is not None and a >= sum(best):
                break
            b = places.get(tuple(left[i + a: i + a + need]), -1)
            if b >= 0 and (best is None or a + b < sum(best)):
                best = (a, b)
        # A partner found late in this reach is the nearest only if nothing nearer lies beyond it.
        if best is not None or reach >= max(len(left) - i, len(right) - j) or reach >= _MAX_SKIP:
            return best
        reach *= 4


CELLS = 16_000_000
"""Most cells with which everything is compared with everything; longer sequences get a band, as wide as they differ
in length."""
MOST_CELLS = 200_000_000
"""A byte each: a band is no wider than this allows."""
LEAST_BAND = 256  # chosen: operations that either side may lack beyond the difference in length
SAME_NAME, SAME_INSIDE, SAME_MODULE, SAME_SHAPES = 4, 3, 2, 1
"""The worth of a pair. The parts after the first together outweigh one more pair, so that pairs of the right module
win over more pairs of the wrong one."""


def most_alike_pairs(one: Int64, other: Int64) -> Int64:
    """Return for each element of ``one`` the index of its partner in ``other``, -1 for none, [n]; the order is kept.

    Args:
        one: each element's name, and what else makes a pair more alike: its contents or neighbours, its module, its
            shapes, all as numbers, [4, n]. ``SAME_NAME`` and those beside it say what each is worth.
        other: the same of the other sequence, [4, m].
    """
    n, m = one.shape[1], other.shape[1]
    found = np.full(n, -1, np.int64)
    if not n or not m:
        return found
    wanted = max(abs(n - m) + LEAST_BAND, CELLS // (2 * n))
    band = min(wanted, max(LEAST_BAND, MOST_CELLS // (2 * n)), m)
    _align(np.ascontiguousarray(one), np.ascontiguousarray(other), band, np.zeros((n + 1, 2 * band + 1), np.int8),
           np.zeros(m + 1, np.int32), np.zeros(m + 1, np.int32), found)
    return found


@kept_loop("int64[:,:]", "int64[:,:]", "int64", "int8[:,:]", "int32[:]", "int32[:]", "int64[:]")
def _align(one, other, band, came, before, now, met):  # type: ignore[no-untyped-def]
    """Put partners into ``met``. ``came`` is where the best way into a cell comes from: 0 above, 1 left, 2 a pair;
    ``before`` and ``now`` are two rows of what the best ways are worth."""
    n, m = one.shape[1], other.shape[1]
    width = 2 * band + 1
    for i in range(1, n + 1):
        centre = i * m // n
        low, high = max(1, centre - band), min(m, centre + band)
        now[low - 1] = before[low - 1]
        for j in range(low, high + 1):
            best, way = before[j], 0
            if now[j - 1] > best:
                best, way = now[j - 1], 1
            if one[0, i - 1] == other[0, j - 1]:
                worth = SAME_NAME
                if one[1, i - 1] == other[1, j - 1]:
                    worth += SAME_INSIDE
                if one[2, i - 1] == other[2, j - 1]:
                    worth += SAME_MODULE
                if one[3, i - 1] == other[3, j - 1]:
                    worth += SAME_SHAPES
                if before[j - 1] + worth >= best:
                    best, way = before[j - 1] + worth, 2
            now[j] = best
            came[i, j - centre + band] = way
        for j in range(high + 1, min(m, (i + 1) * m // n + band) + 1):  # as far as the next row looks
            now[j] = now[high]
        before, now = now, before
    pairs = 0
    i, j = n, m
    while i > 0 and j > 0:
        centre = i * m // n
        at = j - centre + band
        if at < 0:
            i -= 1
        elif at >= width:
            j -= 1
        elif came[i, at] == 2:
            met[i - 1] = j - 1
            pairs += 1
            i, j = i - 1, j - 1
        elif came[i, at] == 1:
            j -= 1
        else:
            i -= 1
    return pairs
