"""Typed shape of one trace event: only the fields the graph needs are decoded, the rest is skipped by msgspec.

Times become integers without a float in between: a float64 cannot hold today's microseconds with nanoseconds.
"""

from __future__ import annotations

from decimal import ROUND_HALF_UP, Decimal, InvalidOperation
from typing import Any

import msgspec

MAX_US = 9_000_000_000_000_000
"""Largest microsecond value accepted (the year 2255): times 1000 it still fits an int64."""


def decimal_nanoseconds(text: bytes) -> tuple[int, bool]:
    """JSON text of any number of microseconds, or one in quotes → nanoseconds and whether it is valid.

    Rounded half up. ``null``, NaN, infinities, other JSON values and numbers beyond ``MAX_US`` are not valid (0).
    """
    try:
        number = Decimal(text.decode("ascii").strip().strip('"').strip())
    except (InvalidOperation, UnicodeDecodeError, ValueError):
        return 0, False
    # adjusted() first: 1e999999 would otherwise become an integer of a million digits.
    if not number.is_finite() or number.adjusted() > 16 or abs(number) > MAX_US:
        return 0, False
    if number.adjusted() < -6:
        return 0, True
    return int((number * 1000).to_integral_value(ROUND_HALF_UP)), True


def integer(value: Any) -> int:
    """An integer, or its digits as text; -1 for what is no number or does not fit 64 bits.

    (An unsigned 64-bit -1 stands for "none" in some traces.)
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
"""The one value of every ``Raw`` field that the text does not have."""


class Args(msgspec.Struct, gc=False, omit_defaults=True):
    """``args`` of an event. Numbers are -1 and texts empty when absent; ``Raw`` keeps JSON text undecoded.

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
    """An ``Event`` from a generically decoded JSON value whose fields have unexpected types; None if it is no object.

    A field that cannot be read as its type is left out, so one odd argument does not lose the event.
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
    """The events as JSON text, without the list's brackets, in which nothing is odd any more.

    Numbers in quotes are numbers, and those beyond 64 bits -1; names of processes, threads and groups are texts.
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
