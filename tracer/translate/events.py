"""Writing the events of a profiler JSON, and what the texts of marked ranges mean."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

BLOCK_BYTES = 8 << 20  # chosen: memory for a block of text
_STEP = re.compile(r"^\W*(?:train(?:ing)?[ _-]?)?(?:step|iteration|iter|batch)[ _#:=-]*(\d{1,9})\W*$", re.IGNORECASE)
_OPERATION = re.compile(r"^(?P<name>[\w.:<>, ]+?)(?:, seq = (?P<seq>\d+))?(?:, op_id = \d+)?"
                        r"(?:, sizes = (?P<sizes>.*?))?(?:, input_op_ids = .*)?$")
_DISPATCHED = re.compile(r"^[\w.]+::\w")
_BACKWARD = re.compile(r"^(?:autograd::engine::evaluate_function: |\w+Backward\d*(?:, |$)|Optimizer\.)")


def complete_event(category: str, name: str, start_ns: int, end_ns: int, process: int, thread: int | str,
                   **arguments: Any) -> dict[str, Any]:
    """Return a complete event ("X"). Times are written as digits: a float would lose nanoseconds."""
    return {"ph": "X", "cat": category, "name": name, "pid": process, "tid": thread, "ts": microseconds(start_ns),
            "dur": microseconds(max(end_ns - start_ns, 0)), "args": arguments}


def microseconds(ns: int) -> msgspec.Raw:
    """Return nanoseconds as the digits of microseconds."""
    return msgspec.Raw(f"{ns // 1000}.{ns % 1000:03d}".encode())


def marked_range(text: str, start_ns: int, end_ns: int, process: int, thread: int) -> dict[str, Any]:
    """Return the event of a range that a program marked: an operation, a step, or an annotation of its own.

    An operation is what ``emit_nvtx`` marks: ``aten::linear, seq = 12, op_id = 3, sizes = [[8, 16], [32, 16]]``. A
    step is a range such as ``step 5`` or ``iteration_5``; ``ProfilerStep#5`` stays what it is.
    """
    step = _STEP.match(text)
    if step is not None:
        return complete_event("user_annotation", f"ProfilerStep#{int(step[1])}", start_ns, end_ns, process, thread)
    if not _DISPATCHED.match(text) and not _BACKWARD.match(text):
        return complete_event("user_annotation", text, start_ns, end_ns, process, thread)
    found = _OPERATION.match(text)
    if found is None:
        return complete_event("cpu_op", text, start_ns, end_ns, process, thread)
    arguments: dict[str, Any] = {}
    if found["seq"]:
        arguments["Sequence number"] = int(found["seq"])
    if found["sizes"] and (sizes := _sizes(found["sizes"])) is not None:
        arguments["Input Dims"] = sizes
    return complete_event("cpu_op", found["name"].strip(), start_ns, end_ns, process, thread, **arguments)


def _sizes(text: str) -> list[Any] | None:
    try:
        value = msgspec.json.decode(text.encode())
    except msgspec.DecodeError:
        return None
    return value if isinstance(value, list) else None


def written(head: dict[str, Any], events: Iterable[dict[str, Any]]) -> Iterator[bytes]:
    """Yield the text of a trace with these top-level fields and events, in blocks."""
    encode = msgspec.json.Encoder().encode
    parts = [encode(head)[:-1], b"," if head else b"", b'"traceEvents":[']
    held, first = 0, True
    for event in events:
        text = encode(event)
        parts += [text] if first else [b",\n", text]
        first = False
        held += len(text)
        if held >= BLOCK_BYTES:
            yield b"".join(parts)
            parts, held = [], 0
    yield b"".join([*parts, b"]}"])
