# mypy: disable-error-code="no-untyped-def"
"""The inner loops of learned prices: features' codes, walks through trees, and measured neighbours of products."""

from __future__ import annotations

from tracer.machine_code import kept_loop

BLOCK = 16
"""Rows that walk a tree together: enough to hide the loads' latency, few enough to stay in the first cache."""
WIDE, NARROW = 0.5, 0.05
"""The constants c of the weights 1/(d² + c)² of products d octaves away, for the plane and the mean; octaves²:
chosen."""
_HELD = 1e-3
"""Holds the plane near 0 where few products tell it."""


@kept_loop("float32[:,:]", "float32[:]", "int32[:]", "uint8[:,:]")
def find_codes(rows, edges, start, result):  # type: ignore[no-untyped-def]
    """Count the edges below each value: fills in the codes, [n, f], which were 0, and returns 0; see ``Bins``."""
    for f in range(rows.shape[1]):
        first, count = start[f], start[f + 1] - start[f]
        if count < 1:
            continue
        for i in range(rows.shape[0]):
            value = rows[i, f]
            # Branchless lower bound: how many edges are below the value.
            at, left = 0, count
            while left > 1:
                half = left >> 1
                at += half if edges[first + at + half - 1] < value else 0
                left -= half
            if left == 1 and edges[first + at] < value:
                at += 1
            result[i, f] = at
    return 0


@kept_loop("uint8[:,:]", "uint32[:]", "float32[:]", "int32[:]", "uint8[:]", "int64[:]", "float64[:]")
def walk_trees(codes, words, values, start, depth, place, result):  # type: ignore[no-untyped-def]
    """Add the leaf of each tree to each row's result; returns 0.

    Args:
        codes: of whole blocks of rows, [n, f].
        words, values, start, depth: see ``Trees``.
        place: to work in, [BLOCK].
        result: [n].
    """
    for block in range(0, codes.shape[0], BLOCK):
        rows = codes[block:block + BLOCK]
        for tree in range(depth.shape[0]):
            first = start[tree]
            for r in range(BLOCK):
                place[r] = 0
            for _ in range(depth[tree]):
                for r in range(BLOCK):
                    word = words[first + place[r]]
                    goes_right = rows[r, word & 0xFF] > (word >> 8) & 0xFF
                    place[r] = (word >> 16) + (1 if goes_right else 0)
            for r in range(BLOCK):
                result[block + r] += values[first + place[r]]
    return 0


@kept_loop("int64[:,:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]")
def find_groups(head, code, batch, m, low, high):  # type: ignore[no-untyped-def]
    """Fill in the groups of the next smaller and the next larger m, −1 where there is none; returns 0."""
    for i in range(len(code)):
        # First group not before (code, batch, m).
        at, end = 0, len(head)
        while at < end:
            middle = (at + end) // 2
            before = head[middle, 0] < code[i] or (head[middle, 0] == code[i] and (
                head[middle, 1] < batch[i] or (head[middle, 1] == batch[i] and head[middle, 2] < m[i])))
            if before:
                at = middle + 1
            else:
                end = middle
        above = at if at < len(head) and head[at, 0] == code[i] and head[at, 1] == batch[i] else -1
        below = at - 1 if at > 0 and head[at - 1, 0] == code[i] and head[at - 1, 1] == batch[i] else -1
        if above >= 0 and head[above, 2] == m[i]:
            below = above
        low[i] = below if below >= 0 else above
        high[i] = above if above >= 0 else below
    return 0


def _between(lesser, larger, below, above, value):
    """Values of two neighbours by their distances; of one where there is no other."""
    if lesser < 0:
        return value[larger]
    if larger < 0:
        return value[lesser]
    part = below / (below + above)
    return (1 - part) * value[lesser] + part * value[larger]


@kept_loop("int64[:]", "int64[:]", "int64[:]", "float64[:]", "float64[:]", "int64[:]", "int64[:,:]", "float32[:,:]",
           "float32[:]", "float64[:]", "float32[:,:]", "float64[:]", inner=(_between,))
def describe_products(group, n, k, log_n, log_k, start, site, log_site, value, time_us,  # type: ignore[no-untyped-def]
                      result, between_us):
    """Fill in what the products of a group say of others; returns 0.

    Args:
        group: of each product, −1 for none, [n].
        n, k, log_n, log_k: its weight, and the logarithms to base 2, [n].
        start, site, log_site, value, time_us: of those measured: see ``Neighbours``, and their times, µs.
        result: the features but the one that is interpolated along k, [n, ``WIDTH``]; others are left as they are.
        between_us: the time interpolated along k, µs, where there are neighbours on both sides, [n].
    """
    for i in range(len(group)):
        if group[i] < 0:
            continue
        # Places of the next smaller and larger k under the same n, then n under the same k.
        lesser_k, larger_k, lesser_n, larger_n = -1, -1, -1, -1
        w0, wx, wy, wxx, wxy, wyy, v0, vx, vy = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
        mean, total, nearest = 0.0, 0.0, 1e30
        for j in range(start[group[i]], start[group[i] + 1]):
            if site[j, 0] == n[i]:
                if site[j, 1] == k[i]:
                    continue
                if site[j, 1] < k[i]:
                    if lesser_k < 0 or site[j, 1] > site[lesser_k, 1]:
                        lesser_k = j
                elif larger_k < 0 or site[j, 1] < site[larger_k, 1]:
                    larger_k = j
            elif site[j, 1] == k[i]:
                if site[j, 0] < n[i]:
                    if lesser_n < 0 or site[j, 0] > site[lesser_n, 0]:
                        lesser_n = j
                elif larger_n < 0 or site[j, 0] < site[larger_n, 0]:
                    larger_n = j
            x, y = log_site[j, 0] - log_n[i], log_site[j, 1] - log_k[i]
            square = x * x + y * y
            nearest = min(nearest, square)
            close = 1.0 / ((square + NARROW) * (square + NARROW))
            mean += close * value[j]
            total += close
            w = 1.0 / ((square + WIDE) * (square + WIDE))
            w0, wx, wy = w0 + w, wx + w * x, wy + w * y
            wxx, wxy, wyy = wxx + w * x * x, wxy + w * x * y, wyy + w * y * y
            v0, vx, vy = v0 + w * value[j], vx + w * x * value[j], vy + w * y * value[j]
        if total > 0:
            a, b, c = w0 + _HELD, wxx + _HELD, wyy + _HELD
            # Cramer's rule for the plane's height at the product itself.
            whole = a * (b * c - wxy * wxy) - wx * (wx * c - wxy * wy) + wy * (wx * wxy - b * wy)
            result[i, 0] = (v0 * (b * c - wxy * wxy) - wx * (vx * c - wxy * vy) + wy * (vx * wxy - b * vy)) / whole
            result[i, 1] = mean / total
            result[i, 2] = nearest ** 0.5
        if lesser_k >= 0:
            result[i, 3] = value[lesser_k]
            result[i, 4] = log_k[i] - log_site[lesser_k, 1]
        if larger_k >= 0:
            result[i, 5] = value[larger_k]
            result[i, 6] = log_site[larger_k, 1] - log_k[i]
        if lesser_k >= 0 and larger_k >= 0:
            part = (k[i] - site[lesser_k, 1]) / (site[larger_k, 1] - site[lesser_k, 1])
            between_us[i] = (1 - part) * time_us[lesser_k] + part * time_us[larger_k]
        if lesser_k >= 0 or larger_k >= 0:
            result[i, 8] = _between(lesser_k, larger_k, result[i, 4], result[i, 6], value)
        if lesser_n >= 0:
            result[i, 9] = value[lesser_n]
            result[i, 10] = log_n[i] - log_site[lesser_n, 0]
        if larger_n >= 0:
            result[i, 11] = value[larger_n]
            result[i, 12] = log_site[larger_n, 0] - log_n[i]
        if lesser_n >= 0 or larger_n >= 0:
            result[i, 13] = _between(lesser_n, larger_n, result[i, 10], result[i, 12], value)
    return 0
