"""Links the events of a window: its context, the call that launched each piece of device work, and collectives.

Joining on `External id` is wrong in many eras; correlation → call → innermost enclosing operation is right in all.
There is one collective for each collective kernel, and for each recorded collective without device work. Up to four
places hold its facts. Best first: the kernel's own arguments (2024 on), the `record_param_comms` operation around its
launch, the `nccl:*` annotation around it, the kernel's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracer.columns import named
from tracer.graph import (
    LAUNCHING,
    NONE,
    CollectiveTable,
    KernelKind,
    KernelTable,
    LaunchKind,
    LaunchTable,
    LossReport,
    Meta,
    OpKind,
    OpTable,
    Phase,
)
from tracer.input_file import list_of
from tracer.kineto.columns import Interner
from tracer.kineto.events import Args, call_kind, dtype_name, integer, is_blocking_copy
from tracer.step_work import while_capturing

_LATEST_NS = 1 << 61
"""The year 2043. A later zero of the clock is damage: added to a timestamp, it could exceed 64 bits."""
_FLAGS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_VERSIONS = ("cuda_runtime_version", "cuda_driver_version", "cupti_version", "hip_runtime_version",
             "hip_driver_version", "roctracer_version", "rocprofiler_version")


def fill_meta(meta: Meta, metadata: dict[str, Any], is_list: bool, categories: Iterable[str | None],
              devices: np.ndarray) -> None:
    """Set what the trace's top-level fields give; ``devices`` are the device ids of the recorded work.

    Fields of unexpected types are left out, never an error.
    """
    found = set(categories)
    if is_list:
        meta.era = "list-2020"
    elif found & {"Operator", "Runtime", "Kernel"}:
        meta.era = "kineto-2021"
    else:
        meta.era = "kineto"
    _device(meta, metadata.get("deviceProperties"), devices)
    info = metadata.get("distributedInfo")
    if isinstance(info, dict):
        meta.rank = integer(info.get("rank"))
        meta.world_size = integer(info.get("world_size"))
        meta.leave_out_unbelievable()
        meta.backend = str(info.get("backend") or "")
        groups = info.get("pg_config")
        if isinstance(groups, list):
            meta.process_groups = [group for group in groups if isinstance(group, dict)]
        if info.get("nccl_version"):
            meta.versions["nccl_version"] = str(info["nccl_version"])
    for key in _VERSIONS:
        if metadata.get(key) not in (None, ""):
            meta.versions[key] = str(metadata[key])
    for key in ("torch_version", "pytorch_version", "PyTorch Version"):
        if metadata.get(key):
            meta.torch_version = str(metadata[key])
    for key in _FLAGS:
        if key in metadata:
            meta.profiler_flags[key] = str(metadata[key]).lower() in ("1", "true")


def base_time_ns(metadata: dict[str, Any]) -> int:
    """Return ``baseTimeNanoseconds``, the zero of relative timestamps; 0 where timestamps count from the epoch."""
    value = integer(metadata.get("baseTimeNanoseconds"))
    return value if 0 <= value < _LATEST_NS else 0


def _device(meta: Meta, properties: Any, devices: np.ndarray) -> None:
    listed = [entry for entry in properties if isinstance(entry, dict)] if isinstance(properties, list) else []
    meta.device_count = len(listed) or len(np.unique(devices))
    if not listed:
        return
    main = int(np.bincount(devices[devices >= 0]).argmax()) if (devices >= 0).any() and devices.max() < 4096 else 0
    # AMD numbers all agents, CPUs included, so that the work's device may not be listed: take any GPU of the host then.
    entry = next((e for e in listed if integer(e.get("id")) == main), listed[0])
    meta.device = str(entry.get("name") or "")
    meta.device_memory_bytes = integer(entry.get("totalGlobalMem"))
    meta.sm_count = integer(entry.get("numSms"))
    major, minor = integer(entry.get("computeMajor")), integer(entry.get("computeMinor"))
    if major >= 0 and minor >= 0:
        meta.compute_capability = f"{major}.{minor}"


_KIND_OF_WORK = {
    KernelKind.COMPUTE: LaunchKind.KERNEL, KernelKind.COLLECTIVE: LaunchKind.KERNEL,
    KernelKind.MEMCPY: LaunchKind.MEMCPY, KernelKind.MEMSET: LaunchKind.MEMSET,
}


ENGINE_PAUSE_NS = 200_000
"""The engine launches a gradient sum 10–40 µs after its function (V100, 2020); between passes it pauses longer."""


@dataclass(slots=True)
class LinkedWork:
    """The columns of device work that linking needs, in one row order (times in nanoseconds from the window)."""

    kind: np.ndarray
    device: np.ndarray
    stream: np.ndarray
    start: np.ndarray
    correlation: np.ndarray


def link(work: LinkedWork, calls: LaunchTable, processes: np.ndarray) -> np.ndarray:
    """Return the launching call of each piece of device work, ``NONE`` where it was not recorded.

    Correlation ids are unique within one process. Several calls may share an id (several processes in a file, a driver
    call inside a runtime call). The launching call is then taken from the process that owns the device. It is the
    latest call that starts no later than the work, and the outermost of nested calls.

    Args:
        processes: number of each call's process, [calls].
    """
    launch = np.full(len(work.start), NONE, np.int32)
    rows = np.flatnonzero(calls.correlation >= 0)
    if len(rows) == 0 or len(launch) == 0:
        return launch
    rows = rows[np.lexsort((calls.start_ns[rows], calls.correlation[rows]))]
    ids = calls.correlation[rows]
    low = np.searchsorted(ids, work.correlation, side="left")
    high = np.searchsorted(ids, work.correlation, side="right")
    matched = (high > low) & (work.correlation >= 0)
    single = matched & (high - low == 1)
    launch[single] = rows[low[single]]
    several = np.flatnonzero(matched & ~single)
    if len(several):
        owners = _device_owners(work.device[single], processes[launch[single]])
        shared: dict[tuple[int, int | None], _Sharing] = {}
        for row in several.tolist():
            key = int(low[row]), owners.get(int(work.device[row]))
            if key not in shared:
                shared[key] = _sharing(rows[low[row]:high[row]], key[1], calls, processes)
            launch[row] = shared[key].at(int(work.start[row]))
    return launch


def _device_owners(devices: np.ndarray, processes: np.ndarray) -> dict[int, int]:
    """Return for each device the process that launched most of its work, among work with a unique call."""
    owners: dict[int, int] = {}
    for device in np.unique(devices).tolist():
        found, counts = np.unique(processes[devices == device], return_counts=True)
        owners[device] = int(found[counts.argmax()])
    return owners


@dataclass(slots=True)
class _Sharing:
    """The calls of one correlation id by start, and the outermost call around each."""

    start: np.ndarray
    outermost: list[int]

    def at(self, start: int) -> int:
        """Return the call that launched the work starting at a time."""
        return self.outermost[max(int(np.searchsorted(self.start, start, side="right")) - 1, 0)]


def _sharing(calls_of_id: np.ndarray, owner: int | None, calls: LaunchTable, processes: np.ndarray) -> _Sharing:
    """Group the calls of one id, sorted by start; those of the device's owner alone, if it has any."""
    if owner is not None and (mine := calls_of_id[processes[calls_of_id] == owner]).size:
        calls_of_id = mine
    parents = dict(zip(calls_of_id.tolist(), calls.parent[calls_of_id].tolist(), strict=True))
    outermost: dict[int, int] = {}
    for call in parents:
        chain = [call]
        while chain[-1] not in outermost and parents[chain[-1]] in parents:
            chain.append(parents[chain[-1]])
        top = outermost.get(chain[-1], chain[-1])
        outermost.update(dict.fromkeys(chain, top))
    return _Sharing(calls.start_ns[calls_of_id], [outermost[call] for call in parents])


def classify(calls: LaunchTable, strings: list[str], launch: np.ndarray, kind: np.ndarray) -> np.ndarray:
    """Return the ``LaunchKind`` of each call: by the device work it launched, else by its name.

    Of two nested calls only the one with the device work counts as a launch; the other is OTHER.
    """
    codes, name = np.unique(calls.name, return_inverse=True)
    kinds = np.array([call_kind(strings[code]) for code in codes.tolist()], np.int8)[name]
    blocking = named(calls.name, strings, is_blocking_copy)
    has_work = np.zeros(len(calls), bool)
    linked = launch >= 0
    has_work[launch[linked]] = True
    graph = kinds == LaunchKind.GRAPH
    for work_kind, launch_kind in _KIND_OF_WORK.items():  # COMPUTE first: a copy overrides it, as none mixes both
        of_kind = np.zeros(len(calls), bool)
        of_kind[launch[linked & (kind == work_kind)]] = True
        kinds[of_kind & ~graph] = launch_kind
    launches = np.isin(kinds, LAUNCHING)
    nested = np.flatnonzero(calls.parent >= 0)
    outer = calls.parent[nested]
    kinds[outer[launches[outer] & ~has_work[outer] & has_work[nested]]] = LaunchKind.OTHER
    kinds[nested[launches[nested] & ~has_work[nested] & launches[outer]]] = LaunchKind.OTHER
    # AMD records no device work for some copies, which then are only a wait.
    kinds[(kinds == LaunchKind.MEMCPY) & blocking & ~has_work] = LaunchKind.BLOCKING_SYNC
    return kinds


def adopt_gradient_sums(calls: LaunchTable, ops: OpTable) -> int:
    """Link launches of the autograd engine between two operations to the operation before them; return their number.

    Until 2021 no range surrounded what the engine does after a backward function: summing gradients of the same tensor.
    Those launches lie in no operation, right after the function whose outputs they sum.
    """
    backward = np.unique(ops.thread[ops.phase == Phase.BACKWARD])
    alone = (calls.op < 0) & np.isin(calls.kind, (LaunchKind.KERNEL, LaunchKind.MEMCPY, LaunchKind.MEMSET))
    adopted = 0
    for thread in backward.tolist():
        top = np.flatnonzero((ops.thread == thread) & (ops.parent < 0) & (ops.kind == OpKind.OPERATION))
        rows = np.flatnonzero(alone & (calls.thread == thread))
        at = np.searchsorted(ops.start_ns[top], calls.start_ns[rows], side="right") - 1
        rows, before = rows[at >= 0], top[at[at >= 0]]
        near = calls.start_ns[rows] - (ops.start_ns + ops.duration_ns)[before] <= ENGINE_PAUSE_NS
        near &= ops.phase[before] == Phase.BACKWARD
        calls.op[rows[near]] = before[near]
        adopted += int(near.sum())
    return adopted


def count_losses(loss: LossReport, work: LinkedWork, calls: LaunchTable, strings: list[str], launch: np.ndarray,
                 window_has_calls: bool) -> None:
    """Fill the counts of device work without a recorded launch, and of launches without device work."""
    orphan = launch < 0
    loss.orphan_kernels = int(orphan.sum())
    if len(work.start):
        stream = work.device * np.int64(1 << 32) + work.stream
        _, group = np.unique(stream, return_inverse=True)
        first = np.full(int(group.max()) + 1, np.iinfo(np.int64).max, np.int64)
        np.minimum.at(first, group[~orphan], work.start[~orphan])
        loss.leading_orphans = int((orphan & (work.start < first[group])).sum())
    if not window_has_calls:
        return
    has_work = np.zeros(len(calls), bool)
    has_work[launch[~orphan]] = True
    wanted = np.isin(calls.kind, (LaunchKind.KERNEL, LaunchKind.MEMCPY, LaunchKind.GRAPH)) & ~has_work
    wanted &= ~while_capturing(calls, strings)
    loss.launches_without_kernels = int(wanted.sum())


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
SAME_SIZE = {"all_reduce", "broadcast", "reduce"}


def collective_kind(text: str) -> str:
    """Return the kind named in a collective's name, annotation or kernel name, or "unknown"."""
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
    above = _Describing(ops, op_args, annotations)
    with_described_child = {int(ops.parent[row]) for row in op_args}
    rows: list[tuple[int, int, int]] = []  # (time, kernel, describing operation)
    covered: set[int] = set()
    for kernel in np.flatnonzero(kernels.kind == KernelKind.COLLECTIVE).tolist():
        described, seen = above.best(int(kernels.op[kernel]))
        covered.update(seen)
        rows.append((int(kernels.start_ns[kernel]), kernel, described))
    for row in sorted({*op_args, *annotations} - covered):
        if row in op_args and op_args[row].collective.lower() in _NOT_COLLECTIVES:
            continue
        described, seen = above.best(row)
        if described in covered or (row in annotations and row in with_described_child):
            continue
        covered.update(seen)
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


class _Describing:
    """What describes a collective launched in an operation: the nearest operation above with recorded arguments, else
    the nearest annotation. Each operation is climbed once, however many collectives lie below it."""

    def __init__(self, ops: OpTable, op_args: dict[int, Args], annotations: dict[int, str]) -> None:
        self._parent = ops.parent
        self._described = {row for row, args in op_args.items() if args.collective.lower() not in _NOT_COLLECTIVES}
        self._describing = self._described | set(annotations)
        self._nearest: dict[int, int] = {}
        self._best: dict[int, int] = {}

    def best(self, op: int) -> tuple[int, list[int]]:
        """Return the operation that describes best, and the describing ones up to it that no earlier call gave."""
        first = row = self._at_or_above(op)
        seen = []
        while row >= 0 and row not in self._best:
            seen.append(row)
            row = NONE if row in self._described else self._at_or_above(int(self._parent[row]))
        end = self._best[row] if row >= 0 else seen[-1] if seen else NONE
        self._best.update((each, end if end in self._described else each) for each in seen)
        return (self._best[first] if first >= 0 else op), seen

    def _at_or_above(self, op: int) -> int:
        """Return the nearest describing operation: this one, or one above it."""
        passed = []
        while op >= 0 and op not in self._describing and op not in self._nearest:
            passed.append(op)
            op = int(self._parent[op])
        found = self._nearest.get(op, op) if op >= 0 else NONE
        self._nearest.update(dict.fromkeys(passed, found))
        return found


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
            table.dtype[index] = strings[dtype_name(args.dtype)]
        if table.is_async[index] == NONE and args.is_async is not None:
            table.is_async[index] = int(str(args.is_async).lower() in ("1", "true"))
    if op >= 0:
        _from_shapes(table, index, op, op in annotations, ops, strings, texts)
    if kind in SAME_SIZE and table.elements_out[index] == NONE:
        table.elements_out[index] = table.elements_in[index]


def _function(kernel: str) -> str:
    """Return the bare function name in a kernel's signature."""
    return re.split(r"[<(]", kernel.replace("(anonymous namespace)::", ""), maxsplit=1)[0]


def _from_shapes(table: CollectiveTable, index: int, op: int, is_annotation: bool, ops: OpTable, strings: Interner,
                 texts: list[str]) -> None:
    """Set elements and dtype from recorded inputs: all inputs of a `nccl:*` annotation, else the first tensor.

    2023 traces and custom all-reduces have no other source.
    """
    shapes, types = int(ops.shapes[op]), int(ops.dtypes[op])
    if table.elements_in[index] == NONE and shapes >= 0:
        tensors = [shape for shape in _sizes(texts[shapes]) if shape][:None if is_annotation else 1]
        if tensors:
            table.elements_in[index] = min(sum(math.prod(shape) for shape in tensors), np.iinfo(np.int64).max)
    if table.dtype[index] == NONE and types >= 0:
        names = (name for name in list_of(texts[types]) if isinstance(name, str) and name)
        if name := dtype_name(next(names, "")):
            table.dtype[index] = strings[name]


def _sizes(text: str) -> list[list[int]]:
    """Return the shapes of tensors; [] if any of them is no list of sizes."""
    found = list_of(text)
    whole = all(isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) for shape in found)
    return found if whole else []
