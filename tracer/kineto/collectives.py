"""The collectives of a window: one row for each collective kernel, and for each recorded one without device work.

What is known about a collective is spread over up to four places, best first: the kernel's own arguments (2024 on),
the `record_param_comms` operation around its launch, the `nccl:*` annotation around it, the kernel's name.
"""

from __future__ import annotations

import math
import re

import numpy as np

from tracer.decode import list_of
from tracer.graph import NONE, CollectiveTable, KernelKind, KernelTable, OpTable
from tracer.kineto.columns import Interner
from tracer.kineto.events import Args, integer

_NOT_COLLECTIVES = {"wait", "init", "start_coalescing", "end_coalescing", "startcoalescing", "endcoalescing", "",
                    "barrier_wait", "destroy", "abort"}
_ANNOTATION = re.compile(r"(?:nccl|gloo|mpi|ucc|xccl|c10d):_?(\w+)")
_KINDS: tuple[tuple[str, str], ...] = (
    ("alltoall", "all_to_all"), ("allreduce", "all_reduce"), ("reducescatter", "reduce_scatter"),
    ("allgather", "all_gather"), ("broadcast", "broadcast"), ("barrier", "barrier"), ("sendrecv", "send_recv"),
    ("crossdevicereduce", "all_reduce"), ("quickreduce", "all_reduce"), ("dispatch", "all_to_all"),
    ("combine", "all_to_all"), ("notify", "all_to_all"), ("moea2a", "all_to_all"), ("coalesced", "unknown"),
    ("reduce", "reduce"), ("send", "send"), ("recv", "recv"), ("gather", "all_gather"),
)
_DTYPES = {
    "float": "float32", "half": "float16", "bfloat16": "bfloat16", "double": "float64", "int": "int32",
    "long": "int64", "long int": "int64", "byte": "uint8", "unsigned char": "uint8", "char": "int8",
    "signed char": "int8", "bool": "bool", "short": "int16", "float8_e4m3fn": "float8_e4m3fn",
}
SAME_SIZE = {"all_reduce", "broadcast", "reduce"}


def collective_kind(text: str) -> str:
    """The kind named in a collective's name, annotation or kernel name; "unknown" if none is."""
    plain = text.lower().replace("_", "")
    for key, kind in _KINDS:
        if key in plain:
            return kind
    return "unknown"


def find_collectives(ops: OpTable, kernels: KernelTable, op_args: dict[int, Args], kernel_args: dict[int, Args],
                     strings: Interner) -> CollectiveTable:
    """Build the table, ordered by time. ``op_args`` and ``kernel_args`` give the recorded arguments by row."""
    texts = list(strings)
    annotations = _annotation_rows(ops, texts)
    by_op: dict[int, list[int]] = {}
    rows: list[tuple[int, int, int]] = []  # (time, kernel, describing operation)
    covered: set[int] = set()
    for kernel in np.flatnonzero(kernels.kind == KernelKind.COLLECTIVE).tolist():
        described, seen = _describing(int(kernels.op[kernel]), ops, op_args, annotations)
        covered |= seen
        rows.append((int(kernels.start_ns[kernel]), kernel, described))
        by_op.setdefault(described, []).append(kernel)
    for row in sorted({*op_args, *annotations} - covered):
        if row in op_args and op_args[row].collective.lower() in _NOT_COLLECTIVES:
            continue
        described, seen = _describing(row, ops, op_args, annotations)
        if described in covered or (row in annotations and _has_described_child(row, op_args, ops)):
            continue
        covered |= seen
        rows.append((int(ops.start_ns[described]), NONE, described))
    rows.sort()
    table = CollectiveTable.empty(len(rows))
    order: dict[int, int] = {}
    for index, (_, kernel, op) in enumerate(rows):
        _fill(table, index, kernel, op, ops, kernels, op_args, kernel_args, annotations, strings, texts)
        group = int(table.group[index])
        table.order[index] = order[group] = order.get(group, -1) + 1
    return table


def _annotation_rows(ops: OpTable, texts: list[str]) -> dict[int, str]:
    found = {code: match.group(1) for code in np.unique(ops.name).tolist() if (match := _ANNOTATION.match(texts[code]))
             and texts[code].split(":", 1)[0] in ("nccl", "gloo", "mpi", "ucc", "xccl") and "::" not in texts[code]}
    rows = np.flatnonzero(np.isin(ops.name, list(found))) if found else np.zeros(0, np.int64)
    return {row: found[int(ops.name[row])] for row in rows.tolist()}


def _describing(op: int, ops: OpTable, op_args: dict[int, Args], annotations: dict[int, str]) -> tuple[int, set[int]]:
    """The operation that describes a collective launched in ``op`` best, and all describing ones on the way up."""
    seen: set[int] = set()
    best, start = NONE, op
    while op >= 0:
        if op in op_args and op_args[op].collective.lower() not in _NOT_COLLECTIVES:
            seen.add(op)
            best = op
            break
        if op in annotations:
            seen.add(op)
            best = op if best == NONE else best
        op = int(ops.parent[op])
    return (start if best == NONE else best), seen


def _has_described_child(row: int, op_args: dict[int, Args], ops: OpTable) -> bool:
    return any(int(ops.parent[child]) == row for child in op_args)


def _fill(table: CollectiveTable, index: int, kernel: int, op: int, ops: OpTable, kernels: KernelTable,
          op_args: dict[int, Args], kernel_args: dict[int, Args], annotations: dict[int, str], strings: Interner,
          texts: list[str]) -> None:
    table.kernel[index] = kernel
    table.op[index] = op
    sources = [args for args in (kernel_args.get(kernel), op_args.get(op)) if args is not None]
    names = [args.collective for args in sources] + [annotations.get(op, "")]
    names.append(_function(texts[int(kernels.name[kernel])]) if kernel >= 0 else "")
    kinds = [kind for kind in map(collective_kind, filter(None, names)) if kind != "unknown"]
    kind = kinds[0] if kinds else "unknown"
    table.kind[index] = strings[kind]
    for args in sources:
        for column, value in (("elements_in", args.elements_in), ("elements_out", args.elements_out),
                              ("group_size", integer(args.group_size))):
            values = getattr(table, column)
            if values[index] == NONE and 0 <= value <= np.iinfo(values.dtype).max:
                values[index] = value
        group = args.group if args.group is not None else args.group_id
        if table.group[index] == NONE and group is not None:
            table.group[index] = strings[str(group)]
        if table.ranks[index] == NONE and args.ranks:
            table.ranks[index] = strings[args.ranks if isinstance(args.ranks, str) else str(args.ranks)]
        if table.dtype[index] == NONE and args.dtype:
            table.dtype[index] = strings[_DTYPES.get(args.dtype.lower(), args.dtype.lower())]
        if table.is_async[index] == NONE and args.is_async is not None:
            table.is_async[index] = int(str(args.is_async).lower() in ("1", "true"))
    if op >= 0:
        _from_shapes(table, index, op, op in annotations, ops, strings, texts)
    if kind in SAME_SIZE and table.elements_out[index] == NONE:
        table.elements_out[index] = table.elements_in[index]


def _function(kernel: str) -> str:
    """The bare function's name of a kernel's signature."""
    return re.split(r"[<(]", kernel.replace("(anonymous namespace)::", ""), maxsplit=1)[0]


def _from_shapes(table: CollectiveTable, index: int, op: int, is_annotation: bool, ops: OpTable, strings: Interner,
                 texts: list[str]) -> None:
    """Elements and dtype from recorded inputs: of a `nccl:*` annotation all, of another operation the first tensor.

    2023 traces and custom all-reduces have nothing else.
    """
    shapes, types = int(ops.shapes[op]), int(ops.dtypes[op])
    if table.elements_in[index] == NONE and shapes >= 0:
        tensors = [shape for shape in _sizes(texts[shapes]) if shape][:None if is_annotation else 1]
        if tensors:
            table.elements_in[index] = min(sum(math.prod(shape) for shape in tensors), np.iinfo(np.int64).max)
    if table.dtype[index] == NONE and types >= 0:
        names = (name for name in list_of(texts[types]) if isinstance(name, str) and name)
        name = next(names, "").removeprefix("c10::").lower()
        if name:
            table.dtype[index] = strings[_DTYPES.get(name, name)]


def _sizes(text: str) -> list[list[int]]:
    """Shapes of tensors; none where one of them is no list of sizes."""
    found = list_of(text)
    whole = all(isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) for shape in found)
    return found if whole else []
