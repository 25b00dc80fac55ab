"""The ``ExecutionGraph``: one rank's recorded window as columns.

Nothing here is a Python object per event. Each table is a small dataclass of equally long NumPy arrays;
``graph.row("ops", i)`` gives a thin row view for people, code works on the columns. Strings are stored once in
``graph.strings``; a column of strings holds int32 codes into it, -1 for "none". Times are int64 nanoseconds
from the window's start (``meta.base_time_ns`` is that start on the job's shared clock).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from tracer.arrays import Int8, Int32, Int64
from tracer.columns import NONE, Table
from tracer.guard import MOST_RANKS
from tracer.shown import Chart, Shown, time_chart

if TYPE_CHECKING:
    import networkx
    import pandas

    from tracer.views import Argument, Row


LEAST_STEP_NS = 1_000
"""Shortest time of a training step: anything below a microsecond is no step."""

SHAPE_ONLY = "shape-only"
"""``meta.era`` of a step that never ran: its operations have an order, 1 ns apart, and no times."""


class Phase(IntEnum):
    """The part of a training step that an operation belongs to."""

    OTHER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    DATA = 4


class OpKind(IntEnum):
    """Whether a row of ``ops`` was computed by the framework or only annotates a range."""

    OPERATION = 0
    ANNOTATION = 1


class LaunchKind(IntEnum):
    """The kind of a runtime or driver call, by its effect."""

    OTHER = 0
    KERNEL = 1
    MEMCPY = 2
    MEMSET = 3
    GRAPH = 4
    EVENT_RECORD = 5
    STREAM_WAIT = 6
    BLOCKING_SYNC = 7


LAUNCHING = (LaunchKind.KERNEL, LaunchKind.MEMCPY, LaunchKind.MEMSET, LaunchKind.GRAPH)
"""Calls that start device work."""
HOST_READ = "aten::_local_scalar_dense"
"""The operation under ``.item()``, ``bool(tensor)`` and the like: on a GPU it waits for all work before it."""


class KernelKind(IntEnum):
    """The kind of a piece of device work."""

    COMPUTE = 0
    MEMCPY = 1
    MEMSET = 2
    COLLECTIVE = 3


class SyncKind(IntEnum):
    """The kind of a recorded synchronisation, by what it waits for."""

    STREAM_WAIT_EVENT = 0
    EVENT_SYNC = 1
    STREAM_SYNC = 2
    DEVICE_SYNC = 3


class GapKind(IntEnum):
    """The reason why a host thread ran no operation and no call."""

    PYTHON = 0
    DATA_LOADING = 1
    ALLOCATOR = 2
    PROFILER = 3
    BLOCKED = 4


class Place(IntEnum):
    """The memory on which an operation of a step traced by shapes works. Recorded windows show it by their kernels.

    An operation reads and writes the host's memory or the device's, or copies between the two.
    """

    HOST = 0
    DEVICE = 1
    TO_DEVICE = 2
    TO_HOST = 3


class WaitSource(IntEnum):
    """The evidence for the operation that first needs a collective's result; see ``CollectiveTable``."""

    OBSERVED = 0
    """A recorded wait."""
    MODELLED = 1
    """The data dependence of a step that never ran: where the compute stream would have to wait."""


class StepSource(IntEnum):
    """The evidence by which the steps of a window were found, best first."""

    PROFILER_STEP = 0
    OPTIMIZER = 1
    DATA_LOADER = 2
    ANNOTATION = 3
    PERIOD = 4
    REGION = 5
    """Regions that the user named: the best evidence, numbered last because files hold the other numbers."""


@dataclass(slots=True)
class OpTable(Table):
    """One framework operation or annotation a row, sorted by (thread, start, -duration, event index).

    ``parent`` is a row of this table. ``sequence`` is autograd's sequence number, ``forward_thread`` the profiler's
    number of the thread that ran the forward op. ``shapes``, ``dtypes``, ``strides`` and ``scalars`` are the codes of
    the JSON texts the profiler wrote (decode with ``graph.arguments``). ``place`` is a ``Place`` in steps traced by
    shapes, else ``NONE``. ``python_calls`` counts the calls of Python functions on the row's thread since the previous
    row or the step's begin; ``NONE`` where not counted.
    """

    name: Int32
    kind: Int8
    parent: Int32
    thread: Int32
    start_ns: Int64
    duration_ns: Int64
    sequence: Int64
    forward_thread: Int64
    external_id: Int64
    record_id: Int64
    shapes: Int32
    dtypes: Int32
    strides: Int32
    scalars: Int32
    module: Int32
    phase: Int8
    step: Int32
    et_node: Int64
    place: Int8
    python_calls: Int32

    ENUMS: ClassVar[dict[str, type[IntEnum]]] = {"kind": OpKind, "phase": Phase, "place": Place}
    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset({"name", "shapes", "dtypes", "strides", "scalars", "module"})
    ADDED: ClassVar[frozenset[str]] = frozenset({"place", "python_calls"})


@dataclass(slots=True)
class LaunchTable(Table):
    """One runtime or driver call a row (launches, syncs and all others), sorted by (thread, start).

    ``op`` is the innermost enclosing operation on the same thread. ``parent`` is the enclosing call when calls
    nest (a driver call inside a runtime call), else ``NONE``.
    """

    name: Int32
    kind: Int8
    op: Int32
    parent: Int32
    thread: Int32
    start_ns: Int64
    duration_ns: Int64
    correlation: Int64
    step: Int32

    ENUMS: ClassVar[dict[str, type[IntEnum]]] = {"kind": LaunchKind}
    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset({"name"})


@dataclass(slots=True)
class KernelTable(Table):
    """One piece of device work a row, sorted by start. ``launch`` is its call, ``NONE`` where that was not recorded.

    ``step`` is the step of the *launch*. Grid and block are in blocks and threads; ``bytes`` are of copies and memsets.
    """

    name: Int32
    kind: Int8
    launch: Int32
    op: Int32
    device: Int32
    stream: Int64
    start_ns: Int64
    duration_ns: Int64
    correlation: Int64
    grid_x: Int32
    grid_y: Int32
    grid_z: Int32
    block_x: Int32
    block_y: Int32
    block_z: Int32
    registers: Int32
    shared_bytes: Int32
    bytes: Int64
    step: Int32

    ENUMS: ClassVar[dict[str, type[IntEnum]]] = {"kind": KernelKind}
    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset({"name"})


@dataclass(slots=True)
class CollectiveTable(Table):
    """One collective as this rank saw it. ``order`` counts within its process group, from 0.

    ``elements_in`` and ``elements_out`` are per rank; ``kernel`` is ``NONE`` where no device work was recorded
    (gloo). ``kind`` is a code of "all_reduce", "all_to_all", "all_gather", "reduce_scatter", "broadcast",
    "reduce", "send", "recv", "send_recv", "barrier" or "unknown". ``ranks`` are those of the group; where our own
    recorder noted a send or a receive, the sender and the receiver.

    ``wait_op`` is the first later operation that touches the result; ``NONE`` if there is none or it is not known.
    ``wait_source``, a ``WaitSource``, is the evidence for it.
    """

    kernel: Int32
    op: Int32
    kind: Int32
    group: Int32
    ranks: Int32
    dtype: Int32
    elements_in: Int64
    elements_out: Int64
    group_size: Int32
    order: Int32
    is_async: Int8
    wait_op: Int32
    wait_source: Int8

    ENUMS: ClassVar[dict[str, type[IntEnum]]] = {"wait_source": WaitSource}
    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset({"kind", "group", "ranks", "dtype"})
    ADDED: ClassVar[frozenset[str]] = frozenset({"wait_op", "wait_source"})


@dataclass(slots=True)
class SyncTable(Table):
    """One recorded CUDA synchronisation (``cuda_sync`` events), sorted by start.

    ``launch`` is the call that synchronised; ``wait_stream`` and ``record_correlation`` say what it waited for
    (the stream of the event, the correlation of the call that recorded it) where known.
    """

    kind: Int8
    launch: Int32
    stream: Int64
    start_ns: Int64
    duration_ns: Int64
    correlation: Int64
    wait_stream: Int64
    record_correlation: Int64

    ENUMS: ClassVar[dict[str, type[IntEnum]]] = {"kind": SyncKind}


@dataclass(slots=True)
class GapTable(Table):
    """Host time outside any operation and any call, between two neighbours of one thread."""

    thread: Int32
    start_ns: Int64
    duration_ns: Int64
    kind: Int8
    step: Int32

    ENUMS: ClassVar[dict[str, type[IntEnum]]] = {"kind": GapKind}


@dataclass(slots=True)
class StepTable(Table):
    """One training step a row, in time order. ``thread`` ran the step. ``python_calls`` counts the calls of Python
    functions on that thread; ``NONE`` where not counted."""

    name: Int32
    start_ns: Int64
    duration_ns: Int64
    thread: Int32
    python_calls: Int32

    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset({"name"})
    ADDED: ClassVar[frozenset[str]] = frozenset({"python_calls"})


@dataclass(slots=True)
class OverheadTable(Table):
    """The profiler's own work (buffer flushes and the like), to be kept out of predictions."""

    name: Int32
    thread: Int32
    start_ns: Int64
    duration_ns: Int64

    STRING_COLUMNS: ClassVar[frozenset[str]] = frozenset({"name"})


@dataclass(slots=True)
class AllocationTable(Table):
    """One change of memory a row, in time order: ``bytes`` are positive when allocated, negative when freed.

    Recorded windows have the changes that the profiler saw (``profile_memory``). Steps traced by shapes have those of
    all storages, each at the operation that made it; memory from before the step has -1 as ``op`` and ``start_ns``.
    ``total_bytes`` is all allocated memory after the change, ``holds`` an index into ``tracer.device_memory.Holds``;
    both are ``NONE`` if unknown. ``device`` is ``NONE`` for the host's memory. ``address`` identifies an allocation.
    """

    op: Int32
    thread: Int32
    start_ns: Int64
    bytes: Int64
    total_bytes: Int64
    address: Int64
    device: Int32
    holds: Int8


@dataclass(frozen=True, slots=True)
class Thread:
    """A host thread as the trace names it."""

    pid: str
    tid: str
    name: str = ""


@dataclass(slots=True)
class LossReport:
    """The losses and repairs of a trace; every count is of events or steps."""

    events_read: int = 0
    orphan_kernels: int = 0
    """Device work whose launch was not recorded (launched before the window, or lost)."""
    leading_orphans: int = 0
    """Orphan kernels that start before any launched work of their stream."""
    launches_without_kernels: int = 0
    """Launch calls whose device work was not recorded (zero-size memsets excluded)."""
    lossy_steps: int = 0
    """Steps that lost device work which other steps have: see ``tracer.step_work``."""
    empty_steps: int = 0
    """Steps at the window's borders that held almost no work and were left out."""
    unlike_repeats: int = 0
    """Repetitions of the same operations that differ too much from each other to be steps."""
    clamped_children: int = 0
    """Host events that stuck out of their parent and were cut to it."""
    dropped_events: int = 0
    """Events without usable times (NaN, negative, missing) or too broken to decode."""
    shifted_kernels: int = 0
    """Device work that was moved because its device's clock was behind the host's."""
    early_kernels: int = 0
    """Device work recorded before its launch by a clock that no constant shift mends, left as it was."""
    placed_kernels: int = 0
    """Device work with an impossible start that was placed after its launch."""
    cut_kernels: int = 0
    """Device work with an impossible duration that was cut."""
    repaired_events: int = 0
    """Events whose JSON was invalid and could be mended."""
    unreadable_device_events: int = 0
    """Timed events of an unknown kind in a process that is not a host's: work of a device, which the graph lacks."""
    unreadable_device_calls: int = 0
    """Calls of an accelerator's runtime in a trace without readable device work: what they started is missing."""
    other_process_events: int = 0
    """Timed events of other processes of the file, where the graph holds one of several."""
    truncated_bytes: int = 0
    """Bytes of an unfinished tail that had to be thrown away."""
    notes: list[str] = field(default_factory=list)
    """One sentence for each loss or repair that a user should know."""

    @property
    def mistimed_kernels(self) -> int:
        """Return the number of kernels whose recorded times were changed, or are known to be wrong."""
        return self.shifted_kernels + self.early_kernels + self.placed_kernels + self.cut_kernels


@dataclass(frozen=True, slots=True)
class ProgramNote:
    """How a captured program was started (see ``tracer.program_note``).

    Attributes:
        name: the script or module, as it was named.
        module: whether it ran as with ``python -m``.
        digest: SHA-256 of its text.
        arguments: its arguments; ``LEFT_OUT`` in the place of those that are not noted.
        options: its options by name, each with its whole number, given or by default.
    """

    name: str
    module: bool
    digest: str
    arguments: list[str]
    options: dict[str, int | None]


@dataclass(slots=True)
class Meta:
    """Context of one rank's window. Empty strings and ``NONE`` mean "the trace does not say"."""

    source: str = ""
    era: str = ""
    """The detected trace format: "list-2020", "kineto-2021", "kineto-2022" or "kineto"; or ``SHAPE_ONLY``."""
    device: str = ""
    device_count: int = 0
    device_memory_bytes: int = NONE
    sm_count: int = NONE
    compute_capability: str = ""
    clock_mhz: int = NONE  # the median around the measured steps
    rank: int = NONE
    world_size: int = NONE
    backend: str = ""
    torch_version: str = ""
    base_time_ns: int = 0
    window_ns: int = 0
    step_source: int = NONE
    """A ``StepSource``, or ``NONE`` where the window has no steps."""
    step_region: str = ""
    """The name of the regions that mark the steps, where the user gave one."""
    cycle: int = 1
    """Recorded steps that each step here consists of (see ``tracer.step_work``)."""
    profiler_flags: dict[str, bool] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    host_cores: int = NONE
    host_threads: int = NONE
    """Threads that one operation computed with. ``host_cores`` are the cores that the process might use."""
    host_units: list[str] = field(default_factory=list)
    """Instruction sets of the host's processor for narrow numbers (``tracer.cpu_units``); empty where unknown."""
    process_groups: list[dict[str, Any]] = field(default_factory=list)
    unprofiled_step_ns: list[int] = field(default_factory=list)
    """Times of steps without the profiler, ns. Where the host computes, waits for a processor are subtracted."""
    noise: float = 0.0
    """Half width, as a logarithm, that a busy machine adds to every interval (``tracer.capture.machine``)."""
    waited_share: float = 0.0
    """Share of the profiled steps' time that was spent waiting for a processor, as the capture counted it."""
    et_schema: str = ""
    et_joined: int = 0
    """Operations joined to a node of the execution trace."""
    et_candidates: int = 0
    """Operations in the windows that both traces cover: the number that could have been joined."""
    python_events: int = 0
    """``python_function`` events seen; they give modules and gaps and are not kept as rows."""
    module_lines: dict[str, str] = field(default_factory=dict)
    """Module path → the first function outside PyTorch that called the module, such as "train.py(17): step". Empty
    where no stacks were recorded."""
    memory: dict[str, int] = field(default_factory=dict)
    """Bytes of a step traced by shapes alone (see ``tracer.device_memory``): "peak", "peak_blocks", "start", and
    what the peak consists of; empty for recorded windows."""
    memory_moments: list[list[int]] = field(default_factory=list)
    """Moments of a step traced by shapes that may be its peak at other sizes. Each has the bytes that stay, of
    activations, of temporaries of forward and backward, and of the optimizer's (see ``MemoryTracker.moments``)."""
    substitutions: dict[str, int] = field(default_factory=dict)
    """Counts of the substitutes that a shape-only trace put in the place of the CPU's operations, by name."""
    workload: dict[str, Any] = field(default_factory=dict)
    """The "name" and all "settings" (plain values) of a workload of the suite, so that it can be traced again at
    other sizes; empty for other programs."""
    program: ProgramNote | None = None
    """How the program was started, if ``foretrace capture`` ran one."""
    loss: LossReport = field(default_factory=LossReport)

    def leave_out_unbelievable(self) -> None:
        """Remove an impossible rank and world size, and note it in the loss report."""
        for name, what, least in (("rank", "rank", 0), ("world_size", "world size", 1)):
            value = getattr(self, name)
            if value != NONE and not least <= value < MOST_RANKS + least:
                self.loss.notes.append(f"The {what} {value} that the file gives cannot be, and was left out.")
                setattr(self, name, NONE)


CodeOf = Callable[[str], int]


class HasMeta(Protocol):
    """A rank's graph, or what is kept of it: its context is known."""

    @property
    def meta(self) -> Meta:
        """Return the context of the rank's window."""


@dataclass(slots=True, repr=False)
class ExecutionGraph(Shown):
    """One rank's recorded window: tables of operations, calls, device work and more. Conventions: see the module."""

    strings: list[str]
    threads: list[Thread]
    ops: OpTable
    launches: LaunchTable
    kernels: KernelTable
    collectives: CollectiveTable
    syncs: SyncTable
    gaps: GapTable
    steps: StepTable
    overheads: OverheadTable
    meta: Meta
    allocations: AllocationTable = field(default_factory=AllocationTable.empty)

    TABLES: ClassVar[dict[str, type[Table]]] = {
        "ops": OpTable, "launches": LaunchTable, "kernels": KernelTable, "collectives": CollectiveTable,
        "syncs": SyncTable, "gaps": GapTable, "steps": StepTable, "overheads": OverheadTable,
        "allocations": AllocationTable,
    }
    ADDED_TABLES: ClassVar[frozenset[str]] = frozenset({"allocations"})
    """Tables that files of earlier versions lack; they are read as empty."""

    @property
    def computes_on_host(self) -> bool:
        """Return whether operations compute on the host's threads: no device is named, or a CPU, and there is no device
        work except collectives, which CPU jobs have too. A step traced by shapes for a CPU names its device but has no
        compute capability, unlike a GPU's."""
        named = self.meta.device not in ("", "cpu") and bool(self.meta.compute_capability
                                                             or self.meta.era != SHAPE_ONLY)
        return not named and not bool((self.kernels.kind != KernelKind.COLLECTIVE).any())

    def string(self, code: int) -> str:
        """Return the text of a string code; empty for ``NONE``."""
        return "" if code < 0 else self.strings[code]

    def row(self, table: str, index: int) -> Row:
        """Return one row of a table with its strings decoded, for people and for debugging.

        Raises:
            KeyError: There is no such table.
            IndexError: There is no such row.
        """
        from tracer.views import row  # imports this module

        return row(self, table, index)

    def arguments(self, op: int) -> list[Argument]:
        """Return shapes, dtypes, strides and scalar values of the inputs of a row of ``ops``."""
        from tracer.views import arguments  # imports this module

        return arguments(self, op)

    def headline(self) -> str:
        """Return one line that says what was recorded."""
        rank = f"rank {self.meta.rank} of {self.meta.world_size}" if self.meta.rank >= 0 else "one rank"
        return (f"{rank}{f' on {self.meta.device}' if self.meta.device else ''}, {len(self.steps):,} steps, "
                f"{len(self.ops):,} operations, {len(self.launches):,} calls, {len(self.kernels):,} kernels")

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return a maker of each table's DataFrame: strings as categoricals, times in ns from the window's start."""
        from tracer.views import to_pandas  # imports this module

        return {name: partial(to_pandas, self, name) for name in self.TABLES}

    def chart(self) -> Chart:
        """Return a chart of the kernels that take most time in the window; of a host alone, of the operations."""
        table, names = (self.kernels, "kernels") if len(self.kernels) else (self.ops, "operations, with those in them")
        return time_chart([(self, table)], self.headline(), names)

    def to_networkx(self) -> networkx.DiGraph:
        """Return the dependencies of operations, calls and device work as an acyclic graph, to explore."""
        from tracer.views import dependency_graph  # imports this module

        return dependency_graph(self)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the graph atomically as one file, to a local path or fsspec URL.

        Raises:
            GraphFileError: The file cannot be written.
        """
        from tracer.store import save_graph  # imports this module

        save_graph(self, path)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ExecutionGraph:
        """Read a file that holds one graph; nothing in it is executed.

        Raises:
            GraphFileError: The file is corrupt, holds something other than one graph, or is of a newer version.
        """
        from tracer.store import load_graph  # imports this module

        return load_graph(path)


def string_coder(graph: ExecutionGraph) -> CodeOf:
    """Return a function from a text to its code in ``graph.strings``, added if new; ``NONE`` for the empty text."""
    codes = {text: code for code, text in reversed(list(enumerate(graph.strings)))}

    def code_of(text: str) -> int:
        if not text:
            return NONE
        if text not in codes:
            codes[text] = len(graph.strings)
            graph.strings.append(text)
        return codes[text]

    return code_of
