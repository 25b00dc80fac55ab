"""Typed shape of one trace event, and the meaning of a trace's categories and names, for every era and vendor.

Only the fields that the graph needs are decoded; msgspec skips all others. Times become integers directly: a float64
cannot hold present times in microseconds with nanosecond digits.
"""

from __future__ import annotations

import re
from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from enum import IntEnum
from functools import lru_cache
from typing import Any

import msgspec

from tracer.graph import KernelKind, LaunchKind, SyncKind


class NameGroup(IntEnum):
    """The table that an event's category feeds."""

    IGNORED = 0
    OPERATION = 1
    ANNOTATION = 2
    CALL = 3
    DEVICE = 4
    SYNC = 5
    OVERHEAD = 6
    PYTHON = 7
    PYTHON_CALL = 8
    """All Python functions of ``PYTHON``, without names; no category feeds it."""
    FRAME = 9
    """The program's own functions of ``PYTHON``; no category feeds it."""


CATEGORY_GROUPS: dict[str | None, NameGroup] = {
    "cpu_op": NameGroup.OPERATION,
    "Operator": NameGroup.OPERATION,
    "mtia_op": NameGroup.OPERATION,
    "user_annotation": NameGroup.ANNOTATION,
    "cuda_runtime": NameGroup.CALL,
    "cuda_driver": NameGroup.CALL,
    "Runtime": NameGroup.CALL,
    "hip_runtime": NameGroup.CALL,
    "hip_driver": NameGroup.CALL,
    "xpu_runtime": NameGroup.CALL,
    "xpu_driver": NameGroup.CALL,
    "mtia_runtime": NameGroup.CALL,
    "privateuse1_runtime": NameGroup.CALL,
    "privateuse1_driver": NameGroup.CALL,
    "glow_runtime": NameGroup.CALL,
    "kernel": NameGroup.DEVICE,
    "Kernel": NameGroup.DEVICE,
    "gpu_memcpy": NameGroup.DEVICE,
    "Memcpy": NameGroup.DEVICE,
    "gpu_memset": NameGroup.DEVICE,
    "Memset": NameGroup.DEVICE,
    "concurrent_kernel": NameGroup.DEVICE,
    "cuda_sync": NameGroup.SYNC,
    "overhead": NameGroup.OVERHEAD,
    "python_function": NameGroup.PYTHON,
}
"""`gpu_user_annotation` repeats the host's annotations on the device and is deliberately left out."""

IGNORED_CATEGORIES = frozenset({"gpu_user_annotation", "Trace"})
UNREADABLE_DEVICE_CATEGORIES = frozenset({"mtia_ccp_events", "mtia_workloadd", "hpu_op"})
"""Categories of device work that this reader cannot read, on the track of any process."""
_GPU_RUNTIMES = frozenset({"cuda_runtime", "cuda_driver", "Runtime", "hip_runtime", "hip_driver"})
_A_RUNTIME = re.compile(r"\w+_(?:runtime|driver)$")
OTHER_PHASES = frozenset("sftiICnbePNODRvcBE")
"""Phases of the trace-event format in which the profiler writes no durations."""

DEVICE_KINDS: dict[str | None, KernelKind] = {
    "gpu_memcpy": KernelKind.MEMCPY, "Memcpy": KernelKind.MEMCPY,
    "gpu_memset": KernelKind.MEMSET, "Memset": KernelKind.MEMSET,
}

ANNOTATION_NAME = re.compile(
    r"ProfilerStep#|ProfilerStep\*|Optimizer\.|enumerate\(DataLoader\)#|enumerate\(DataPipe\)#|"
    r"DistributedDataParallel\.|nccl:|gloo:|## .* ##$")
"""Names that mark a range; the 2020–21 category `Operator` does not distinguish ranges from operations."""

DATA_LOADER = re.compile(r"enumerate\(Data(?:Loader|Pipe)\)")
"""Ranges in which the next batch is fetched."""

OWN_FRAME = re.compile(r"(?!torch/|<).*\.py\(\d+\): ")
"""Python functions outside of PyTorch, as the profiler names them: "train.py(17): step"."""

COLLECTIVE_KERNEL = re.compile(
    r"^nccl(?:Dev)?Kernel|^rccl|ncclKern|multimem_all_reduce|multimem_one_shot_all_reduce|two_shot_all_reduce|"
    r"one_shot_all_reduce|cross_device_reduce|allreduce_fusion_kernel|oneShotAllReduce|twoShotAllReduce|"
    r"all_reduce_one_shot|all_reduce_two_shot|quickreduce|allreduce_prototype|"
    # Symmetric memory (PyTorch), NVSHMEM, and the own kernels of vLLM, SGLang, TensorRT-LLM and FlashInfer.
    r"multimem_|nvshmem\w*(?:put|get|barrier|broadcast|all_?to_?all|reduce|collect)|nccl_symm|ncclSymk|"
    r"all_to_all_vdev|allToAllV|trtllm_mnnvl_\w*allreduce|mnnvl\w*(?:all_?reduce|all_?to_?all)|moe_?a2a|moeAllToAll|"
    r"lamport\w*(?:reduce|gather)|allreduce_(?:push|lamport)|cross_device_gather|cross_device_all_gather|userbuffers_|"
    # Experts' exchange: DeepEP by its namespaces, and perplexity's kernels.
    r"(?:intranode|internode|internode_ll|hybrid|elastic)::(?:\w+::)*(?:cached_notify|notify|dispatch|combine)|"
    r"(?:deep_?ep|dpsk::ep|pplx\w*)::(?:\w+::)*(?:cached_notify|notify|dispatch|combine)", re.IGNORECASE)


def is_accelerator_call(category: str | None) -> bool:
    """Return whether a category means calls of an accelerator's runtime that no CPU program makes. A CPU program may
    call CUDA or HIP, to ask for a GPU."""
    return category is not None and category not in _GPU_RUNTIMES and bool(_A_RUNTIME.match(category))


@lru_cache(maxsize=1 << 14)
def is_collective_kernel(name: str) -> bool:
    """Return whether a kernel's name is that of a collective; cached, since ranks share names."""
    return bool(COLLECTIVE_KERNEL.search(name))


_CALLS: tuple[tuple[re.Pattern[str], LaunchKind], ...] = (
    (re.compile(r"GraphLaunch"), LaunchKind.GRAPH),
    (re.compile(r"LaunchHostFunc|LaunchDevice"), LaunchKind.OTHER),
    (re.compile(r"^(?:cuda|cu|hip|ze|ur)\w*Launch|LaunchKernel"), LaunchKind.KERNEL),
    (re.compile(r"EventRecord"), LaunchKind.EVENT_RECORD),
    (re.compile(r"StreamWaitEvent"), LaunchKind.STREAM_WAIT),
    (re.compile(r"(?:Stream|Device|Event|Ctx|Context)Synchronize"), LaunchKind.BLOCKING_SYNC),
    (re.compile(r"^(?:cuda|cu|hip)\w*Memcpy|^hip\w*MemcpyWithStream"), LaunchKind.MEMCPY),
    (re.compile(r"^(?:cuda|cu|hip)\w*Memset"), LaunchKind.MEMSET),
)
_BLOCKING_COPY = re.compile(r"^(?:cuda|cu|hip)Memcpy(?!.*Async)")


def call_kind(name: str) -> LaunchKind:
    """Return the kind of a runtime or driver call of any vendor, by its name."""
    for pattern, kind in _CALLS:
        if pattern.search(name):
            return kind
    return LaunchKind.OTHER


def is_blocking_copy(name: str) -> bool:
    """Return whether a copy call always returns only after the copy (no `Async` in its name)."""
    return bool(_BLOCKING_COPY.match(name))


def sync_kind(text: str) -> SyncKind:
    """Return the kind of a `cuda_sync` event from its name or `cuda_sync_kind`."""
    lowered = text.lower()
    if "wait" in lowered:
        return SyncKind.STREAM_WAIT_EVENT
    if "event" in lowered:
        return SyncKind.EVENT_SYNC
    return SyncKind.STREAM_SYNC if "stream" in lowered else SyncKind.DEVICE_SYNC


MAX_US = 9_000_000_000_000_000
"""Largest microsecond value accepted (the year 2255): times 1000 it still fits an int64."""


def decimal_nanoseconds(text: bytes) -> tuple[int, bool]:
    """Convert JSON text of a number of microseconds, quoted or not, to nanoseconds and whether it is valid.

    Rounded half up. ``null``, NaN, infinities, other JSON values and numbers beyond ``MAX_US`` are not valid (0).
    """
    try:
        number = Decimal(text.decode("ascii").strip().strip('"').strip())
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return 0, False
    # adjusted() is checked first: 1e999999 would otherwise become an integer of a million digits.
    if not number.is_finite() or number.adjusted() > 16 or abs(number) > MAX_US:
        return 0, False
    if number.adjusted() < -6:
        return 0, True
    return int((number * 1000).to_integral_value(ROUND_HALF_UP)), True


def integer(value: Any) -> int:
    """Return an integer from a number or its digits; -1 if it is no number or does not fit 64 bits.

    (Some traces write "none" as an unsigned 64-bit -1.)
    """
    if isinstance(value, str) and len(value) > 20:
        return -1
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return -1
    return number if -(2**63) <= number < 2**63 else -1


Raw = msgspec.Raw
ABSENT = msgspec.Raw(b"")
"""The shared value of all ``Raw`` fields that are absent from the text."""


class Args(msgspec.Struct, gc=False, omit_defaults=True):
    """``args`` of an event. Absent numbers are -1, absent texts empty; ``Raw`` keeps JSON text undecoded.

    ``int | str``: some writers put these numbers in quotes (roctracer: ``"bytes": "13248"``).
    """

    external: int | str = msgspec.field(default=-1, name="External id")
    external_lower: int = msgspec.field(default=-1, name="external id")
    event_index: int = msgspec.field(default=-1, name="Ev Idx")
    correlation: int | str = -1
    device: int | str = -1
    stream: int | str = -1
    sequence: int = msgspec.field(default=-1, name="Sequence number")
    forward_thread: int = msgspec.field(default=-1, name="Fwd thread id")
    record_id: int = msgspec.field(default=-1, name="Record function id")
    dims: Raw = msgspec.field(default=ABSENT, name="Input Dims")
    types: Raw = msgspec.field(default=ABSENT, name="Input type")
    strides: Raw = msgspec.field(default=ABSENT, name="Input Strides")
    scalars: Raw = msgspec.field(default=ABSENT, name="Concrete Inputs")
    grid: Raw = ABSENT
    block: Raw = ABSENT
    registers: int = msgspec.field(default=-1, name="registers per thread")
    shared_memory: int = msgspec.field(default=-1, name="shared memory")
    bytes: int | str = -1
    dims_2020: Raw = msgspec.field(default=ABSENT, name="Input dims")
    event_index_2022: int = msgspec.field(default=-1, name="Profiler Event Index")
    modules: str = msgspec.field(default="", name="Module Hierarchy")
    sync_kind: str = msgspec.field(default="", name="cuda_sync_kind")
    wait_stream: int | str = msgspec.field(default=-1, name="wait_on_stream")
    record_correlation: int = msgspec.field(default=-1, name="wait_on_cuda_event_record_corr_id")
    name: str | int | float | None = ""
    collective: str = msgspec.field(default="", name="Collective name")
    elements_in: int = msgspec.field(default=-1, name="In msg nelems")
    elements_out: int = msgspec.field(default=-1, name="Out msg nelems")
    group_size: int | str = msgspec.field(default=-1, name="Group size")
    dtype: str = ""
    group: str | int | None = msgspec.field(default=None, name="Process Group Name")
    group_id: str | int | None = msgspec.field(default=None, name="Process Group ID")
    ranks: str | list[int] | None = msgspec.field(default=None, name="Process Group Ranks")
    is_async: str | int | bool | None = msgspec.field(default=None, name="Is asynchronized op")
    allocated: int = msgspec.field(default=0, name="Bytes")
    total_allocated: int = msgspec.field(default=-1, name="Total Allocated")
    address: int = msgspec.field(default=-1, name="Addr")
    memory_device: int = msgspec.field(default=-1, name="Device Id")
    memory_kind: int = msgspec.field(default=0, name="Device Type")


NO_ARGS = Args()


class Event(msgspec.Struct, gc=False, omit_defaults=True):
    """One element of ``traceEvents``. ``ts`` and ``dur`` stay digits: a float would lose nanoseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: Raw = ABSENT
    dur: Raw = ABSENT
    args: Args | None = None


EVENTS = msgspec.json.Decoder(list[Event])
EVENT = msgspec.json.Decoder(Event)

_ENCODER = msgspec.json.Encoder()
_EVENT_NAMES = [f.encode_name for f in msgspec.structs.fields(Event) if f.name != "args"]
_ARG_FIELDS = msgspec.structs.fields(Args)


def coerce_event(value: Any) -> Event | None:
    """Make an ``Event`` of a decoded JSON value with fields of unexpected types; None if it is no object.

    A field that cannot be converted is left out, so that one odd argument does not lose the event.
    """
    if not isinstance(value, dict):
        return None
    event = Event()
    for name in _EVENT_NAMES:
        if name not in value:
            continue
        item = value[name]
        if name in ("ts", "dur"):
            event.__setattr__(name, Raw(msgspec.json.encode(item)))
        elif name in ("pid", "tid"):
            event.__setattr__(name, item if isinstance(item, int | str) else str(item))
        elif item is not None:
            event.__setattr__(name, str(item))
    arguments = value.get("args")
    if isinstance(arguments, dict):
        event.args = Args()
        for info in _ARG_FIELDS:
            if info.encode_name in arguments:
                try:
                    setattr(event.args, info.name, _coerce(arguments[info.encode_name], info.type))
                except (ValueError, TypeError, OverflowError):
                    continue
    return event


def _coerce(item: Any, kind: Any) -> Any:
    if kind is Raw:
        return Raw(msgspec.json.encode(item))
    if kind is int:
        return integer(item)
    if kind is str:
        return item if isinstance(item, str) else str(item)
    return msgspec.convert(item, kind)


def plain_text(events: list[Event]) -> bytes:
    """Return the events as JSON text in normal form, without the list's brackets.

    Quoted numbers become numbers, and those beyond 64 bits -1; names of processes, threads and groups become texts.
    """
    return b",".join(_ENCODER.encode(_plain_event(event)) for event in events)


def _plain_event(event: Event) -> Event:
    return Event(event.ph, event.cat, event.name, _plain_name(event.pid), _plain_name(event.tid), event.ts, event.dur,
                 None if event.args is None else _plain_args(event.args))


def _plain_name(name: Any) -> str | None:
    return None if name is None else str(name)


def _plain_args(args: Args) -> Args:
    found = Args()
    for info in _ARG_FIELDS:
        value = getattr(args, info.name)
        if info.type is int or info.type == int | str:
            value = integer(value)
        elif info.name == "ranks" and not isinstance(value, str):
            value = str(value) if value else None
        elif info.name in ("group", "group_id", "is_async"):
            value = _plain_name(value)
        elif info.name == "name":
            value = str(value) if value else ""
        setattr(found, info.name, value if value != info.default else info.default)
    return found


_DTYPES = {
    "float": "float32", "half": "float16", "double": "float64", "int": "int32", "long": "int64", "long int": "int64",
    "byte": "uint8", "unsigned char": "uint8", "char": "int8", "signed char": "int8", "short": "int16",
    "short int": "int16",
}


def dtype_name(text: str) -> str:
    """Return torch's name of a type that a trace writes in C++ or as a scalar type ("c10::Half", "Float")."""
    name = text.removeprefix("c10::").lower()
    return _DTYPES.get(name, name)
