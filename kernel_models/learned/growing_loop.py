# mypy: disable-error-code="no-untyped-def"
"""The inner loop of boosting: trees over features of one byte, grown leaf by leaf where a split gains most.

A node looks at as many of the features as it may, picked at random, and at no others: sums over its rows are made for
these alone. That costs a fifth of what sums over all features do where a fifth may be chosen from, and needs no sums to
be kept from node to node. A row's residual is rounded to a whole number, so that it is added up in any order to the
same sum. It lies in one word with the row's place, and words move from node to node, so that a node's lie side by side;
in the sums a one stands in place of the row, and a single addition adds up residuals and counts rows::

      word  = residual × scale << 24 | row
      sum  += residual × scale << 24 | 1
"""

from __future__ import annotations

from tracer.machine_code import kept_loop

CODES = 256
"""Values of a code."""
FIRST, COUNT, SUM, LEVEL, FEATURE, LAST_LEFT, LEFT_COUNT, LEFT_SUM = range(8)
"""Columns of a node: its words' places and their sum, its level, and its best split: what goes left of it."""
NODE = 8
COUNT_BITS, SCALED_BITS = 24, 21
"""Bits of a word for the row or the count of rows, and of one row's residual at most: fewer where rows are so many that
their sum would outgrow the rest of the word."""
_COUNT = (1 << COUNT_BITS) - 1
FEATURE_BITS, CHILD_BITS, ALWAYS_LEFT = 8, 16, 255
"""Of a node's word, see ``trees``: where its bin and its child begin, and the bin of a leaf."""
TOGETHER = 6
"""Features that are summed in one go over the rows: as many additions that do not wait for each other."""


def _pick(order, many, state):
    """Move ``many`` of the features, at random, to the front, by the generator of POSIX's ``drand48``."""
    for j in range(many):
        state[0] = (state[0] * 25214903917 + 11) & 0xFFFFFFFFFFFF
        other = j + (((state[0] >> 17) * (len(order) - j)) >> 31)
        order[j], order[other] = order[other], order[j]


def _add_up(words, a, b, c, d, e, f, sum_a, sum_b, sum_c, sum_d, sum_e, sum_f):
    """Add a node's words to the sums of ``TOGETHER`` features, whose codes are a to f."""
    for word in words:
        row = word & _COUNT
        value = word - row + 1
        sum_a[a[row]] += value
        sum_b[b[row]] += value
        sum_c[c[row]] += value
        sum_d[d[row]] += value
        sum_e[e[row]] += value
        sum_f[f[row]] += value


def _list_splits(sums, codes, left, last_left):
    """List what lies left of each split after a code that occurs, and that code; returns how many there are."""
    total, found = 0, 0
    for code in range(codes - 1):
        total += sums[code]
        left[found], last_left[found] = total, code
        found += 1 if sums[code] != 0 else 0
    return found


def _best_split(node, codes, widths, words, order, many, least_rows, ridge, state, nothing, sums, left, last_left,
                nodes):
    """Fill in a node's best split and return what it gains, 0 where there is none."""
    first, count, total = nodes[node, FIRST], nodes[node, COUNT], nodes[node, SUM]
    if count < 2 * least_rows:
        return 0.0
    _pick(order, many, state)
    for j in range(many):
        for code in range(widths[order[j]]):
            sums[j, code] = nothing
    mine, end = words[first:first + count], many - 1
    for j in range(0, many, TOGETHER):
        # Past the last feature it is summed again, into sums that nobody reads.
        _add_up(mine, codes[order[j]], codes[order[min(j + 1, end)]], codes[order[min(j + 2, end)]],
                codes[order[min(j + 3, end)]], codes[order[min(j + 4, end)]], codes[order[min(j + 5, end)]],
                sums[j], sums[j + 1], sums[j + 2], sums[j + 3], sums[j + 4], sums[j + 5])
    alone = total * (total / (count + ridge))
    best = alone
    for j in range(many):
        for at in range(_list_splits(sums[j], widths[order[j]], left, last_left)):
            left_count = left[at] & _COUNT
            if left_count < least_rows:
                continue
            if count - left_count < least_rows:
                break
            left_sum = float(left[at] >> COUNT_BITS)
            right_sum = total - left_sum
            below, above = left_count + ridge, count - left_count + ridge
            gain = (left_sum * left_sum * above + right_sum * right_sum * below) / (below * above)
            if gain > best:
                best = gain
                nodes[node, FEATURE], nodes[node, LAST_LEFT] = order[j], last_left[at]
                nodes[node, LEFT_COUNT], nodes[node, LEFT_SUM] = left_count, left[at] >> COUNT_BITS
    return best - alone


def _part(node, codes, words, apart, nodes):
    """Put a node's words that go left before those that go right, each in their order."""
    first, end = nodes[node, FIRST], nodes[node, FIRST] + nodes[node, COUNT]
    mine, last_left = codes[nodes[node, FEATURE]], nodes[node, LAST_LEFT]
    at, right = first, 0
    for i in range(first, end):
        word = words[i]
        words[at], apart[right] = word, word
        goes_right = mine[word & _COUNT] > last_left
        at += 0 if goes_right else 1
        right += 1 if goes_right else 0
    for i in range(right):
        words[at + i] = apart[i]


@kept_loop("uint8[:,:]", "int64[:]", "float64[:]", "int64", "float64", "int64", "int64", "int64", "float64", "int64",
           "float64", "int64", "int64[:]", "int64[:]", "int64[:]", "int64[:]", "int64[:,:]", "int64[:]", "int64[:]",
           "int64[:,:]", "float64[:]", "uint32[:]", "float32[:]", "int64[:]", "uint8[:]",
           inner=(_pick, _add_up, _list_splits, _best_split, _part))
def grow_trees(codes, widths, residual, trees, rate, leaves, many, least_rows, ridge,  # type: ignore[no-untyped-def]
               most_levels, most_scaled, nothing, words, apart, order, state, sums, left, last_left, nodes, gain, found,
               values, start, depth):
    """Grow trees on what the ones before left over, by squared error; returns how many nodes they have.

    Args:
        codes: of features and rows, [f, n].
        widths: codes that each feature may have, [f].
        residual: what is to be explained; what is left over in the end, [n].
        trees, rate, leaves, many, least_rows, ridge, most_levels: see ``Boosting``; ``many`` is a count of features.
        most_scaled: what the largest residual becomes as a whole number.
        nothing: 0. LLVM fills with a constant by calling libc, which kept machine code does not find.
        words, apart: to work in, [n] each.
        order, state: of the features (0 to f - 1 at first), [f], and the seed, [1]; as they are left, more trees may
            be grown.
        sums, left, last_left, nodes, gain: to work in, [``many`` and ``TOGETHER`` more, CODES], [CODES] twice, [nodes
            of a tree, NODE], [nodes of a tree].
        found, values, start, depth: the trees, as ``Trees`` has them: [trees × nodes] twice, [trees + 1], [trees].
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
            words[i] = (scaled << COUNT_BITS) + i
            total += scaled
        nodes[0, FIRST], nodes[0, COUNT], nodes[0, SUM], nodes[0, LEVEL] = 0, n, total, 0
        gain[0] = _best_split(0, codes, widths, words, order, many, least_rows, ridge, state, nothing, sums, left,
                              last_left, nodes)
        found[base] = ALWAYS_LEFT << FEATURE_BITS
        used, deepest = 1, 0
        for _ in range(leaves - 1):
            node = 0
            for each in range(1, used):
                if gain[each] > gain[node]:
                    node = each
            if gain[node] <= 0.0:
                break
            _part(node, codes, words, apart, nodes)
            found[base + node] = used << CHILD_BITS | nodes[node, LAST_LEFT] << FEATURE_BITS | nodes[node, FEATURE]
            gain[node] = -1.0
            level = nodes[node, LEVEL] + 1
            deepest = max(deepest, level)
            lower, upper = used, used + 1
            nodes[lower, FIRST], nodes[upper, FIRST] = nodes[node, FIRST], nodes[node, FIRST] + nodes[node, LEFT_COUNT]
            nodes[lower, COUNT], nodes[upper, COUNT] = (
                nodes[node, LEFT_COUNT], nodes[node, COUNT] - nodes[node, LEFT_COUNT])
            nodes[lower, SUM], nodes[upper, SUM] = nodes[node, LEFT_SUM], nodes[node, SUM] - nodes[node, LEFT_SUM]
            for child in (lower, upper):
                nodes[child, LEVEL] = level
                found[base + child] = child << CHILD_BITS | ALWAYS_LEFT << FEATURE_BITS
                gain[child] = 0.0
                if most_levels == 0 or level < most_levels:
                    gain[child] = _best_split(child, codes, widths, words, order, many, least_rows, ridge, state,
                                              nothing, sums, left, last_left, nodes)
            used += 2
        for node in range(used):
            value = 0.0
            if gain[node] >= 0.0:
                value = rate * (nodes[node, SUM] / scale / (nodes[node, COUNT] + ridge))
                for i in range(nodes[node, FIRST], nodes[node, FIRST] + nodes[node, COUNT]):
                    residual[words[i] & _COUNT] -= value
            values[base + node] = value
        base += used
        start[tree + 1] = base
        depth[tree] = deepest
    return base
