"""``check_sizes``: check that two captures of one program were made at the sizes that the user names.

A capture of a user's program does not contain its sizes, so ``--also runs/b:batch=64`` has to be checked. The shapes of
equal operations in two captures must differ as the named sizes do. Dimension ``x`` in capture ``a`` and ``y`` in ``b``
follow the named sizes if

    y - f = (x - f) × size in b / size in a          for a name, or several together; f (-2 to 2) is constant
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from fractions import Fraction
from itertools import combinations

import numpy as np

from graph_predictor.prediction.scenario import EditError
from graph_predictor.sizes.layouts import Shape
from graph_predictor.sizes.scaled_shapes import tensors_in
from tracer.graph import ExecutionGraph, OpKind

Pair = tuple[int, int]
_STAYS = range(-2, 3)
"""Possible numbers of elements of a dimension that are the same at any size: a class token, the last target."""
_MOST_UNEXPLAINED = 0.3
"""Most occurrences of one unexplained change, as a share of the changes that the named sizes explain. A changed size
that was not named causes one frequent change; rows that depend on data (experts') cause many different ones."""
_SAME_WORK = 0.01
"""Largest relative difference of the number of operations a step between two captures of one size."""


def check_sizes(graphs: tuple[ExecutionGraph, ExecutionGraph], sizes: tuple[Mapping[str, int], Mapping[str, int]],
                path: str) -> None:
    """Check that the shapes of two captures differ as their named sizes do.

    Args:
        graphs: graph of the capture to predict from, and of another capture.
        sizes: sizes of each capture, by name.
        path: path of the other capture, for the message.

    Raises:
        EditError: the shapes differ in another way.
    """
    changes = {name: (sizes[0][name], sizes[1][name]) for name in sizes[0] if sizes[0][name] != sizes[1].get(name)}
    pairs = differing(*graphs)
    said = " and ".join(f"{name}={b} where the first has {a}" for name, (a, b) in changes.items())
    if not pairs and _as_many(*graphs):
        if changes:
            raise EditError(f"{path} is said to be of {said}, and no shape differs between the two captures: they are "
                            "of one size; give a capture that was made at another size, or leave --also out.")
        return
    if not pairs:
        return  # the captures differ in the number of operations: a named size may count layers or moments
    if not changes:
        (a, b), _ = pairs.most_common(1)[0]
        raise EditError(f"{path} is said to be of the same sizes as the first capture, and its shapes differ ({a} and "
                        f"{b}, …): name its own sizes, as in --also {path}:NAME={b}.")
    unknown = [name for name, change in changes.items() if not any(_follows(pair, Fraction(change[1], change[0]))
                                                                   for pair in pairs)]
    together = [_product(some) for count in range(1, len(changes) + 1)
                for some in combinations(changes.values(), count)]
    others = Counter({pair: count for pair, count in pairs.items() if not any(_near(pair, one) for one in together)})
    most = max(others.values(), default=0)
    if unknown or most > _MOST_UNEXPLAINED * (pairs.total() - others.total()):
        name = unknown[0] if unknown else next(iter(changes))
        was, will = changes[name]
        own = next((pair for pair, _ in pairs.most_common() if pair[0] == was), None)
        shown = (others or pairs).most_common(1)[0][0]
        raise EditError(f"{path} is said to be of {said}, and its shapes do not differ by that "
                        f"({shown[0]} has become {shown[1]}): name the sizes that it was made at"
                        + (f", as in --also {path}:{name}={own[1]}." if own is not None and own[1] != will else
                           ", all that differ between the two captures."))


def differing(first: ExecutionGraph, second: ExecutionGraph) -> Counter[Pair]:
    """Count the pairs of different sizes that one dimension has in two captures of a program."""
    found: Counter[Pair] = Counter()
    a, b = _by_name(first), _by_name(second)
    for name in a.keys() & b.keys():
        if len(a[name]) != len(b[name]):
            continue
        for mine, other in zip(a[name], b[name], strict=True):
            if [len(shape) for shape in mine] == [len(shape) for shape in other]:
                found.update(pair for one, two in zip(mine, other, strict=True)
                             for pair in zip(one, two, strict=True) if pair[0] != pair[1])
    return found


def _by_name(graph: ExecutionGraph) -> dict[str, list[list[Shape]]]:
    """Return the shapes of each operation's tensors by name, in the order in which they first occur."""
    found: dict[str, list[list[Shape]]] = {}
    for name, text in _distinct(graph):
        found.setdefault(name, []).append(list(tensors_in(text)))
    return found


def _distinct(graph: ExecutionGraph) -> Iterator[tuple[str, str]]:
    ops = graph.ops
    rows = np.flatnonzero((ops.shapes >= 0) & (ops.kind == OpKind.OPERATION))
    rows = rows[np.argsort(ops.start_ns[rows], kind="stable")]
    if len(rows):
        _, first = np.unique(np.stack([ops.name[rows], ops.shapes[rows]]), axis=1, return_index=True)
        for row in rows[np.sort(first)].tolist():
            yield graph.string(int(ops.name[row])), graph.string(int(ops.shapes[row]))


def _as_many(first: ExecutionGraph, second: ExecutionGraph) -> bool:
    """Return whether two captures have the same operations, and about equally many a step."""
    a, b = (len(graph.ops) / max(len(graph.steps), 1) for graph in (first, second))
    return abs(a - b) <= _SAME_WORK * a and set(_distinct(first)) == set(_distinct(second))


def _follows(pair: Pair, ratio: Fraction) -> bool:
    return any((pair[0] - stays) * ratio == pair[1] - stays for stays in _STAYS)


def _near(pair: Pair, ratio: Fraction) -> bool:
    """Return whether a dimension follows a size roughly, as after strided convolutions with rounded results."""
    ends = sorted((pair[0] + stays) * ratio - stays for stays in (_STAYS[0], _STAYS[-1]))
    return ends[0] <= pair[1] <= ends[1]


def _product(changes: tuple[Pair, ...]) -> Fraction:
    found = Fraction(1)
    for old, new in changes:
        found *= Fraction(new, old)
    return found
