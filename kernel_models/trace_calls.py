"""Device work of each operation of a recorded graph, and its time.

``graph_calls`` walks a graph's kernels once. Each kernel belongs to the innermost operation around its launch, or to
the nearest outer operation whose sizes were recorded. Copies and memsets carry their own bytes. A kernel without an
operation, or whose operation has no sizes, is known by its name only and flagged "unsized". Collectives are priced
elsewhere: they are counted and left out.

Equal operations are processed once: a million operations take seconds.

Fused embedding lookups (FBGEMM) are paired with their gradients, since each records half of what both need. The forward
operation records tables, indices and offsets; where the trace keeps no numbers, the columns of the tables are missing.
Its autograd node records only the gradient [samples, columns of all tables]. Neither carries the other's number, but
nodes are numbered in the order of the forward operations:

    forward   lookup A ─ lookup B                  (time →)
    backward              node 451 (of B) ─ node 450 (of A)

So within a step the i-th lookup belongs to the node with the i-th smallest sequence number. Both counts must be equal,
and the bags of each lookup must be its samples times its tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from kernel_models.families.copy import memset, transfer
from kernel_models.families.elementwise import elementwise
from kernel_models.families.registry import Inputs, forward_rule, unsized
from kernel_models.kernel_names import element_dtype, family_hint, short_kernel_name, uses_tf32
from kernel_models.op_call import Family, OpCall
from kernel_models.operation import Operation, backward_calls_of, calls_of
from tracer.arrays import Bool, Int8, Int32, Int64
from tracer.graph import NONE, ExecutionGraph, KernelKind
from tracer.views import Argument

_KINDS = {  # part of the forward operation's name → part of its autograd node's
    "fbgemm::split_embedding_codegen_lookup_": "torch::autograd::CppNode<SplitLookupFunction_",
    "fbgemm::dense_embedding_codegen_lookup_": "torch::autograd::CppNode<SplitLookupFunction_Dense",
}


def pair_lookups(graph: ExecutionGraph) -> dict[int, tuple[int, int]]:
    """Return by row of ``graph.ops``, for fused lookups and their backward: (lookup's row, its tables' columns)."""
    pairs: dict[int, tuple[int, int]] = {}
    for lookup, node in _KINDS.items():
        forwards, nodes = _rows(graph, lookup), _rows(graph, node, "_Dense" not in node)
        for step in np.unique(graph.ops.step[forwards]).tolist():
            ahead = forwards[graph.ops.step[forwards] == step]
            back = nodes[graph.ops.step[nodes] == step]
            back = back[np.argsort(graph.ops.sequence[back], kind="stable")]
            if len(ahead) != len(back):
                continue
            for one, other in zip(ahead[np.argsort(graph.ops.start_ns[ahead])].tolist(), back.tolist(), strict=True):
                width = _width(graph, one, other)
                if width:
                    pairs[one] = pairs[other] = one, width
    return pairs


def lookup_calls(graph: ExecutionGraph, op: int, pair: tuple[int, int]) -> tuple[OpCall, ...]:
    """Return the calls of a lookup or of its autograd node, from the arguments that both recorded."""
    lookup = Operation.from_graph(graph, pair[0])
    rule = forward_rule(lookup.name)
    if rule is not None and "total_D" in rule.names:
        arguments = list(lookup.arguments)
        arguments[rule.names.index("total_D")] = Argument("Scalar", (), None, str(pair[1]))
        lookup = replace(lookup, arguments=tuple(arguments))
    return calls_of(lookup) if op == pair[0] else backward_calls_of(lookup)


def _rows(graph: ExecutionGraph, start: str, without_dense: bool = False) -> Int64:
    codes = [i for i, text in enumerate(graph.strings)
             if text.startswith(start) and not (without_dense and "_Dense" in text)]
    return np.flatnonzero(np.isin(graph.ops.name, codes))


def _width(graph: ExecutionGraph, lookup: int, node: int) -> int:
    """Return the columns of the gradient if its shape fits the lookup's bags, else 0."""
    grad = graph.arguments(node)[:1]
    rule = forward_rule(graph.string(int(graph.ops.name[lookup])))
    if not grad or not grad[0].shape or len(grad[0].shape) != 2 or rule is None:
        return 0
    inputs = Inputs("", tuple(graph.arguments(lookup)), rule.names, "fp32")
    tables, offsets = inputs.optional("D_offsets"), inputs.optional("offsets")
    if tables is None or offsets is None:
        return 0
    samples, columns = grad[0].shape
    return int(columns) if samples * (tables.elements - 1) == offsets.elements - 1 else 0


def pairs_of(ops: Int32, pairs: dict[int, tuple[int, int]]) -> tuple[Int64, Int64]:
    """Return for each of ``ops`` the row of its lookup and the columns of its tables; ``NONE`` without a lookup."""
    found = [pairs.get(op, (NONE, NONE)) for op in ops.tolist()] if pairs else []
    both = np.array(found, np.int64) if found else np.full((len(ops), 2), NONE, np.int64)
    return both[:, 0], both[:, 1]


FAMILIES: tuple[Family, ...] = tuple(Family)
"""Families by their code in ``TraceCalls.family``."""

_CLIMB = 6
"""Most operations, from the innermost outwards, that are searched for sizes: composites nest up to four deep."""
_HALVES = frozenset(f"aten::{library}_convolution_backward_{half}" for library in ("cudnn", "miopen")
                    for half in ("input", "weight"))
"""Operations of 2020–2021 that give the size of one tensor as a list of numbers; where numbers were not recorded, the
operation around both halves knows all sizes."""


class Basis(IntEnum):
    """The origin of a call's sizes."""

    SHAPES = 0
    """The operation's recorded arguments."""
    KERNEL_BYTES = 1
    """The bytes recorded with a copy or memset."""
    NAME = 2
    """No sizes are known: the name of the operation or kernel gives the family."""


@dataclass(frozen=True, slots=True)
class TraceCalls:
    """The device work of a graph, one row a *piece*: an operation's kernels, or one copy, memset or lone kernel.

    Rows are in the order of their first kernels. ``call_offset`` and ``kernel_offset`` have one more entry than there
    are rows: row i has ``call_index[call_offset[i]:call_offset[i + 1]]``, positions in ``calls``, and
    ``kernel[kernel_offset[i]:kernel_offset[i + 1]]``, rows of ``graph.kernels``.

    Attributes:
        calls: Distinct calls.
        op: Row of ``graph.ops`` that the piece belongs to, ``NONE`` without one.
        basis: A ``Basis``.
        family: Position in ``FAMILIES`` of the piece's first call.
        time_ns: Sum of its kernels' durations, ns.
        collective_ns: Sum of the durations of collectives, which were left out, ns.
    """

    calls: list[OpCall]
    op: Int32
    basis: Int8
    family: Int8
    time_ns: Int64
    call_offset: Int64
    call_index: Int32
    kernel_offset: Int64
    kernel: Int32
    collective_ns: int

    def __len__(self) -> int:
        return len(self.op)

    def calls_of_row(self, row: int) -> tuple[OpCall, ...]:
        """Return the calls of one row: of an operation's kernels, or of one copy, memset or lone kernel."""
        return tuple(self.calls[i] for i in self.call_index[self.call_offset[row]:self.call_offset[row + 1]].tolist())

    def time_by_family(self, rows: Bool | None = None) -> dict[Family, int]:
        """Return the time of each family in the chosen rows (default: all), ns, longest first."""
        chosen = np.ones(len(self), bool) if rows is None else rows
        time = np.bincount(self.family[chosen], weights=self.time_ns[chosen], minlength=len(FAMILIES))
        return {FAMILIES[i]: int(time[i]) for i in np.argsort(-time, kind="stable").tolist() if time[i]}


def graph_calls(graph: ExecutionGraph, tf32: bool | None = None) -> TraceCalls:
    """Return the calls of every operation that ran kernels, and of every kernel without an operation.

    Args:
        graph: the graph of one recorded rank.
        tf32: Whether fp32 products are TF32; ``None`` decides by the names of the kernels that ran.
    """
    kernels = graph.kernels
    collective = kernels.kind == KernelKind.COLLECTIVE
    compute = np.flatnonzero(kernels.kind == KernelKind.COMPUTE)
    moved = np.flatnonzero((kernels.kind == KernelKind.MEMCPY) | (kernels.kind == KernelKind.MEMSET))

    target = _operation_with_sizes(graph, kernels.op)
    has_op = target[compute] >= 0
    owned, lone = compute[has_op], compute[~has_op]
    ops, piece_of_kernel = np.unique(target[owned], return_inverse=True)
    book = _Book()
    found = _calls_of_operations(graph, ops, owned, piece_of_kernel, tf32)
    # An operation without recorded sizes runs kernels of several families: each kernel becomes a piece of its own.
    split = np.array([calls is None for calls in found], dtype=bool)
    lone = np.concatenate([lone, owned[split[piece_of_kernel]]])
    kept = ~split[piece_of_kernel]

    piece_ops, piece_calls, piece_basis = [], [], []
    number = np.cumsum(~split) - 1
    for op, calls in zip(ops.tolist(), found, strict=True):
        if calls is not None:
            piece_ops.append(op)
            piece_calls.append(book.numbers(calls))
            piece_basis.append(Basis.NAME if "unsized" in calls[0].flags else Basis.SHAPES)
    kernel_rows = [owned[kept], moved, lone]
    pieces = [number[piece_of_kernel[kept]]]
    for rows, basis, describe in ((moved, Basis.KERNEL_BYTES, _moved_bytes), (lone, Basis.NAME, _by_kernel_name)):
        pieces.append(len(piece_ops) + np.arange(len(rows)))
        piece_ops += kernels.op[rows].tolist()
        calls_of_rows = describe(graph, rows)
        piece_calls += map(book.numbers, calls_of_rows)
        piece_basis += [Basis.NAME if "unsized" in calls[0].flags else basis for calls in calls_of_rows]
    return _assemble(graph, book, piece_ops, piece_calls, piece_basis, np.concatenate(kernel_rows),
                     np.concatenate(pieces), collective)


class _Book:
    """Distinct calls, each with a number."""

    def __init__(self) -> None:
        self.calls: list[OpCall] = []
        self._number: dict[OpCall, int] = {}
        self._seen: dict[int, tuple[tuple[OpCall, ...], tuple[int, ...]]] = {}

    def numbers(self, calls: tuple[OpCall, ...]) -> tuple[int, ...]:
        """Return the number of each of these calls; repeated tuples are looked up quickly."""
        known = self._seen.get(id(calls))
        if known is None:
            for call in calls:
                if call not in self._number:
                    self._number[call] = len(self.calls)
                    self.calls.append(call)
            known = self._seen[id(calls)] = calls, tuple(self._number[call] for call in calls)
        return known[1]


def _assemble(
    graph: ExecutionGraph, book: _Book, ops: list[int], calls: list[tuple[int, ...]], basis: list[Basis],
    kernel_rows: Int64, piece: Int64, collective: Bool,
) -> TraceCalls:
    """Sort pieces by their first kernels, and group the kernels of each piece."""
    duration = graph.kernels.duration_ns
    count = len(ops)
    first = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(first, piece, kernel_rows)
    order = np.argsort(first, kind="stable")
    place = np.empty(count, np.int64)
    place[order] = np.arange(count)
    piece = place[piece]
    time = np.bincount(piece, weights=duration[kernel_rows], minlength=count).astype(np.int64)
    by_piece = np.lexsort((kernel_rows, piece))
    kernel_offset = np.concatenate([[0], np.cumsum(np.bincount(piece, minlength=count))]).astype(np.int64)
    ordered = [calls[i] for i in order.tolist()]
    lengths = np.array([len(numbers) for numbers in ordered], np.int64)
    code = {family: i for i, family in enumerate(FAMILIES)}
    family_of_call = np.array([code[call.family] for call in book.calls] or [0], np.int8)
    return TraceCalls(
        calls=book.calls,
        op=np.array(ops, np.int32)[order] if count else np.empty(0, np.int32),
        basis=np.array(basis, np.int8)[order] if count else np.empty(0, np.int8),
        family=family_of_call[[numbers[0] for numbers in ordered]] if count else np.empty(0, np.int8),
        time_ns=time,
        call_offset=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        call_index=np.array([number for numbers in ordered for number in numbers], np.int32),
        kernel_offset=kernel_offset,
        kernel=kernel_rows[by_piece].astype(np.int32),
        collective_ns=int(duration[collective].sum()),
    )


def _operation_with_sizes(graph: ExecutionGraph, op: Int32) -> Int32:
    """Return for each operation itself, or the nearest outer one with recorded sizes; itself where there is none."""
    ops = graph.ops
    if not len(ops):
        return np.full_like(op, NONE)
    empty = [i for i, text in enumerate(graph.strings) if text in ("[]", "")]
    halves = [i for i, text in enumerate(graph.strings) if text in _HALVES]
    sized = (ops.shapes >= 0) & ~np.isin(ops.shapes, empty) & ~(np.isin(ops.name, halves) & (ops.scalars < 0))
    here, result = op.copy(), op.copy()
    for _ in range(_CLIMB):
        lacking = (here >= 0) & ~sized[np.maximum(here, 0)]
        here = np.where(lacking, ops.parent[np.maximum(here, 0)], here).astype(np.int32)
    found = (here >= 0) & sized[np.maximum(here, 0)]
    result[found] = here[found]
    return result


def _calls_of_operations(
    graph: ExecutionGraph, ops: Int32, kernel_rows: Int64, piece: Int64, tf32: bool | None
) -> list[tuple[OpCall, ...] | None]:
    """Return the calls of each operation; ``None`` where only the names of its kernels tell something."""
    if not len(ops):
        return []
    names, table = graph.kernels.name[kernel_rows], graph.ops
    speaks = _per_name(graph, names, uses_tf32)
    is_tf32 = np.bincount(piece, weights=speaks, minlength=len(ops)) > 0 if tf32 is None else np.full(len(ops), tf32)
    main = _longest_kernel(graph, kernel_rows, piece, len(ops))
    has_lists = _mentions(graph, table.dtypes[ops], "List")
    hint = np.where(has_lists, main, NONE)
    keys = [table.name[ops], table.shapes[ops], table.dtypes[ops], table.strides[ops], table.scalars[ops],
            is_tf32.astype(np.int32), hint]
    lookups = pair_lookups(graph)
    _, example, same = _distinct([*keys, *pairs_of(ops, lookups)])
    calls: list[tuple[OpCall, ...]] = []
    for at in example.tolist():
        op = int(ops[at])
        if op in lookups:
            calls.append(lookup_calls(graph, op, lookups[op]))
            continue
        dtype = element_dtype(graph.string(int(hint[at]))) if hint[at] >= 0 else ""
        calls.append(calls_of(Operation.from_graph(graph, op, dtype or "fp32"), bool(is_tf32[at])))
    # Where the operation is unknown (or has no work of its own) the kernels that ran show the family.
    unknown = np.array([not found or found[0].family is Family.OTHER for found in calls])[same]
    result: list[tuple[OpCall, ...] | None] = [calls[i] for i in same.tolist()]
    if unknown.any():
        rows = np.flatnonzero(unknown)
        _, example, again = _distinct([same[rows], main[rows]])
        better = [_told_by_kernel(graph, int(ops[rows[at]]), int(main[rows[at]]), result[rows[at]] or ())
                  for at in example.tolist()]
        for row, kind in zip(rows.tolist(), again.tolist(), strict=True):
            result[row] = better[kind]
    return result


def _told_by_kernel(
    graph: ExecutionGraph, op: int, kernel_name: int, calls: tuple[OpCall, ...]
) -> tuple[OpCall, ...] | None:
    """Return elementwise calls if an unknown operation's longest kernel is elementwise; else its own, or ``None``."""
    operation = Operation.from_graph(graph, op)
    tensors = Inputs(operation.name, operation.arguments, (), operation.list_dtype).tensors()
    if not tensors:
        return None
    if family_hint(graph.string(kernel_name)) is Family.ELEMENTWISE:
        largest = max(tensors, key=lambda tensor: tensor.elements)
        found = tuple(elementwise(operation.name, [t for t in tensors if t.shape == largest.shape], largest.shape))
        if found:
            return found
    return calls or None


def _moved_bytes(graph: ExecutionGraph, rows: Int64) -> list[tuple[OpCall, ...]]:
    """Return calls of copies and memsets from the recorded bytes and direction."""
    kernels = graph.kernels
    _, example, same = _distinct([kernels.name[rows], kernels.kind[rows], kernels.bytes[rows]])
    calls = []
    for at in rows[example].tolist():
        size, name = int(kernels.bytes[at]), graph.string(int(kernels.name[at]))
        is_set = kernels.kind[at] == KernelKind.MEMSET
        if size < 0:
            calls.append((unsized(Family.MEMSET if is_set else Family.TRANSFER,
                                  "memset" if is_set else _direction(name)[0]),))
        else:
            calls.append((memset(size) if is_set else transfer(_direction(name)[0], size, _direction(name)[1]),))
    return [calls[i] for i in same.tolist()]


def _direction(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the kind and flags of a copy by its name: "Memcpy HtoD (Pinned -> Device)" → ("h2d", ("pinned",))."""
    lower = name.lower().replace(" ", "")
    kind = next((short for short, words in (
        ("h2d", ("htod", "hosttodevice")), ("d2h", ("dtoh", "devicetohost")), ("p2p", ("ptop", "peertopeer")),
        ("d2d", ("dtod", "devicetodevice")), ("h2h", ("htoh", "hosttohost")),
    ) if any(word in lower for word in words)), "d2d")
    side = tuple(word for word in ("pinned", "pageable") if word in lower)
    return kind, side


def _by_kernel_name(graph: ExecutionGraph, rows: Int64) -> list[tuple[OpCall, ...]]:
    """Return the unsized calls of kernels that are known by name only."""
    _, example, same = _distinct([graph.kernels.name[rows]])
    calls = []
    for at in rows[example].tolist():
        name = graph.string(int(graph.kernels.name[at]))
        calls.append((unsized(family_hint(name), short_kernel_name(name)),))
    return [calls[i] for i in same.tolist()]


def _longest_kernel(graph: ExecutionGraph, kernel_rows: Int64, piece: Int64, pieces: int) -> Int32:
    """Return the name of the longest kernel of each piece."""
    order = np.lexsort((graph.kernels.duration_ns[kernel_rows], piece))
    last = np.searchsorted(piece[order], np.arange(pieces), side="right") - 1
    return graph.kernels.name[kernel_rows[order[last]]]


def _per_name(graph: ExecutionGraph, names: Int32, question: Callable[[str], bool]) -> Bool:
    """Return the answer to a question for each of many names; each distinct name is asked once."""
    codes, place = np.unique(names, return_inverse=True)
    return np.array([question(graph.string(code)) for code in codes.tolist()], dtype=bool)[place]


def _mentions(graph: ExecutionGraph, texts: Int32, word: str) -> Bool:
    return _per_name(graph, texts, lambda text: word in text)


def _distinct(columns: Iterable[npt.NDArray[np.integer]]) -> tuple[Int64, Int64, Int64]:
    """Return the numbers of distinct rows over several columns, one row index of each, and every row's number."""
    combined: Int64 | None = None
    for column in columns:
        values, place = np.unique(column, return_inverse=True)
        if combined is None:
            combined = place.astype(np.int64)
        else:
            _, combined = np.unique(combined * len(values) + place, return_inverse=True)
    assert combined is not None
    return np.unique(combined, return_index=True, return_inverse=True)
