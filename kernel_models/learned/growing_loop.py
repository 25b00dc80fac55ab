# mypy: disable-error-code="no-untyped-def"
"""The inner loop of boosting: trees over features of one byte, grown leaf by leaf where a split gains most.

A node looks at as many of the features as it may, picked at random, and at no others: sums over its rows are made for
these alone. That costs a fifth of what sums over all features do where a fifth may be chosen from, and needs no sums to
be kept from node to node. A row's residual is rounded to a whole number and shares a word with a one, so that a single
addition adds up residuals and counts rows, in any order to the same sum::

      word  = residual × scale << 24 | 1
"""

from __future__ import annotations

from tracer.machine_code import kept_loop

CODES = 256
"""Values of a code."""
FIRST, COUNT, SUM, LEVEL, FEATURE, LAST_LEFT, LEFT_COUNT, LEFT_SUM = range(8)
"""Columns of a node: its rows' places and their sum, its level, and its best split: what goes left of it."""
NODE = 8
COUNT_BITS, SCALED_BITS = 24, 21
"""Bits of a word for the count of rows, and of one row's residual at most: fewer where rows are so many that their sum
would outgrow the rest of the word."""
_COUNT = (1 << COUNT_BITS) - 1
FEATURE_BITS, CHILD_BITS, ALWAYS_LEFT = 8, 16, 255
"""Of a node's word, see ``trees``: where its bin and its child begin, and the bin of a leaf."""


def _pick(order, many, state):
    """Move ``many`` of the features, at random, to the front, by the generator of POSIX's ``drand48``."""
    for j in range(many):
        state[0] = (state[0] * 25214903917 + 11) & 0xFFFFFFFFFFFF
        other = j + (((state[0] >> 17) * (len(order) - j)) >> 31)
        order[j], order[other] = order[other], order[j]


def _best_split(node, codes, widths, word, rows, order, many, least_rows, ridge, state, nothing, sums, nodes):
    """Fill in a node's best split and return what it gains, 0 where there is none."""
    first, count, total = nodes[node, FIRST], nodes[node, COUNT], nodes[node, SUM]
    if count < 2 * least_rows:
        return 0.0
    _pick(order, many, state)
    for j in range(many):
        for code in range(widths[order[j]]):
            sums[j, code] = nothing
    for i in range(first, first + count):
        row = rows[i]
        value = word[row]
        for j in range(many):
            sums[j, codes[row, order[j]]] += value
    alone = total * (total / (count + ridge))
    best = alone
    for j in range(many):
        left = 0
        for code in range(widths[order[j]] - 1):
            here = sums[j, code]
            if here == 0:
                continue
            left += here
            left_count = left & _COUNT
            if left_count < least_rows:
                continue
            if count - left_count < least_rows:
                break
            left_sum = left >> COUNT_BITS
            right_sum = total - left_sum
            gain = left_sum * (left_sum / (left_count + ridge)) + right_sum * (right_sum / (count - left_count + ridge))
            if gain > best:
                best = gain
                nodes[node, FEATURE], nodes[node, LAST_LEFT] = order[j], code
                nodes[node, LEFT_COUNT], nodes[node, LEFT_SUM] = left_count, left_sum
    return best - alone


def _part(node, codes, rows, apart, nodes):
    """Put a node's rows that go left before those that go right, each in their order."""
    first, end = nodes[node, FIRST], nodes[node, FIRST] + nodes[node, COUNT]
    feature, last_left = nodes[node, FEATURE], nodes[node, LAST_LEFT]
    at, right = first, 0
    for i in range(first, end):
        row = rows[i]
        rows[at], apart[right] = row, row
        goes_right = codes[row, feature] > last_left
        at += 0 if goes_right else 1
        right += 1 if goes_right else 0
    for i in range(right):
        rows[at + i] = apart[i]


@kept_loop("uint8[:,:]", "int64[:]", "float64[:]", "int64", "float64", "int64", "int64", "int64", "float64", "int64",
           "float64", "int64", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:,:]", "int64[:,:]",
           "float64[:]", "uint32[:]", "float32[:]", "int64[:]", "uint8[:]", inner=(_pick, _best_split, _part))
def grow_trees(codes, widths, residual, trees, rate, leaves, many, least_rows, ridge,  # type: ignore[no-untyped-def]
               most_levels, most_scaled, nothing, word, rows, apart, order, state, sums, nodes, gain, words, values,
               start, depth):
    """Grow trees on what the ones before left over, by squared error; returns how many nodes they have.

    Args:
        codes: of rows and features, [n, f].
        widths: codes that each feature may have, [f].
        residual: what is to be explained; what is left over in the end, [n].
        trees, rate, leaves, many, least_rows, ridge, most_levels: see ``Boosting``; ``many`` is a count of features.
        most_scaled: what the largest residual becomes as a whole number.
        nothing: 0. LLVM fills with a constant by calling libc, which kept machine code does not find.
        word, rows, apart, order, state, sums, nodes, gain: to work in, [n], [n], [n], [f] (0 to f - 1), [1] (the seed),
            [many, CODES], [nodes of a tree, NODE], [nodes of a tree].
        words, values, start, depth: the trees, as ``Trees`` has them: [trees × nodes] twice, [trees + 1], [trees].
    """
    n = len(residual)
    base = 0
    for tree in range(trees):
        most = 1e-300
        for i in range(n):
            most = max(most, abs(residual[i]))
        scale = most_scaled / most
        total = 0
        for i in range(n):
            scaled = round(residual[i] * scale)
            word[i] = (scaled << COUNT_BITS) + 1
            total += scaled
            rows[i] = i
        nodes[0, FIRST], nodes[0, COUNT], nodes[0, SUM], nodes[0, LEVEL] = 0, n, total, 0
        gain[0] = _best_split(0, codes, widths, word, rows, order, many, least_rows, ridge, state, nothing, sums, nodes)
        words[base] = ALWAYS_LEFT << FEATURE_BITS
        used, deepest = 1, 0
        for _ in range(leaves - 1):
            node = 0
            for each in range(1, used):
                if gain[each] > gain[node]:
                    node = each
            if gain[node] <= 0.0:
                break
            _part(node, codes, rows, apart, nodes)
            words[base + node] = used << CHILD_BITS | nodes[node, LAST_LEFT] << FEATURE_BITS | nodes[node, FEATURE]
            gain[node] = -1.0
            level = nodes[node, LEVEL] + 1
            deepest = max(deepest, level)
            left, right = used, used + 1
            nodes[left, FIRST], nodes[right, FIRST] = nodes[node, FIRST], nodes[node, FIRST] + nodes[node, LEFT_COUNT]
            nodes[left, COUNT], nodes[right, COUNT] = (
                nodes[node, LEFT_COUNT], nodes[node, COUNT] - nodes[node, LEFT_COUNT])
            nodes[left, SUM], nodes[right, SUM] = nodes[node, LEFT_SUM], nodes[node, SUM] - nodes[node, LEFT_SUM]
            for child in (left, right):
                nodes[child, LEVEL] = level
                words[base + child] = child << CHILD_BITS | ALWAYS_LEFT << FEATURE_BITS
                gain[child] = 0.0
                if most_levels == 0 or level < most_levels:
                    gain[child] = _best_split(child, codes, widths, word, rows, order, many, least_rows, ridge, state,
                                              nothing, sums, nodes)
            used += 2
        for node in range(used):
            value = 0.0
            if gain[node] >= 0.0:
                value = rate * (nodes[node, SUM] / scale / (nodes[node, COUNT] + ridge))
                for i in range(nodes[node, FIRST], nodes[node, FIRST] + nodes[node, COUNT]):
                    residual[rows[i]] -= value
            values[base + node] = value
        base += used
        start[tree + 1] = base
        depth[tree] = deepest
    return base
