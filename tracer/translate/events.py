"""Events of other profilers in the columns of the PyTorch reader, and the meaning of marked ranges.

Each distinct name is read once and is a number from then on: a name of a megabyte in a million rows costs one megabyte.
::

    rows of an export ──> ``ForeignTexts`` (texts as numbers) ──> ``ForeignBatch`` (columns) ──> ``Collector``
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tracer.arrays import Bool, Int32, Int64
from tracer.graph import NONE
from tracer.guard import NameBudget
from tracer.input_file import value_of
from tracer.kineto.events import MAX_US, NO_ARGS, Args
from tracer.kineto.scanner import EMPTY_TEXT, NO_JSON, NULL, EventBatch

_STEP = re.compile(r"^\W*(?:train(?:ing)?[ _-]?)?(?:step|iteration|iter|batch)[ _#:=-]*(\d{1,9})\W*$", re.IGNORECASE)
_LONGEST_STEP = 200
"""Most characters of a text that may name a step."""
_NAME = re.compile(r"[\w.:<>, ]+$")
_DISPATCHED = re.compile(r"^[\w.]+::\w")
_BACKWARD = re.compile(r"^(?:autograd::engine::evaluate_function: |\w+Backward\d*(?:, |$)|Optimizer\.)")
_MOST_NS = 1000 * MAX_US
_ABSENT = {"ph": EMPTY_TEXT, "name": EMPTY_TEXT, "sync_kind": EMPTY_TEXT, "modules": EMPTY_TEXT,
           **dict.fromkeys(("cat", "pid", "tid", "thread_name"), NULL),
           **dict.fromkeys(("dims", "types", "strides", "scalars", "grid", "block", "dims_2020"), NO_JSON)}
"""The value of an absent field."""


NOTHING: Mapping[str, Any] = {}


class MarkedRange(NamedTuple):
    """The meaning of a marked range's text: its category, name, sequence number and sizes."""

    category: str
    name: str
    sequence: int = NONE
    sizes: bytes = b""


def marked_range(text: str) -> MarkedRange:
    """Return the meaning of a marked range: an operation, a step, or an annotation of the program.

    Operations are marked by ``emit_nvtx``: ``aten::linear, seq = 12, op_id = 3, sizes = [[8, 16], [32, 16]]``. A step
    is a range such as ``step 5`` or ``iteration_5``; ``ProfilerStep#5`` is unchanged.
    """
    step = _STEP.match(text) if len(text) <= _LONGEST_STEP else None
    if step is not None:
        return MarkedRange("user_annotation", f"ProfilerStep#{int(step[1])}")
    if not _DISPATCHED.match(text) and not _BACKWARD.match(text):
        return MarkedRange("user_annotation", text)
    rest, _, _ = text.partition(", input_op_ids = ")
    rest, _, sizes = rest.partition(", sizes = ")
    rest, _, _ = rest.partition(", op_id = ")
    name, _, sequence = rest.partition(", seq = ")
    if not _NAME.match(name):
        return MarkedRange("cpu_op", text)
    whole = int(sequence) if sequence.isascii() and sequence.isdigit() and len(sequence) < 19 else NONE
    found = value_of(sizes) if sizes else None
    return MarkedRange("cpu_op", name.strip(), whole, msgspec.json.encode(found) if isinstance(found, list) else b"")


class Meaning(NamedTuple):
    """A ``MarkedRange`` as codes, and its sequence number."""

    category: int
    name: int
    sequence: int
    sizes: int


def whole_numbers(values: list[int]) -> Int64:
    """Return numbers as an array, -1 for those beyond 64 bits: some formats write "none" as an unsigned 64-bit -1."""
    try:
        return np.array(values, np.int64)
    except OverflowError:
        return np.array([value if -(1 << 63) <= value < 1 << 63 else NONE for value in values], np.int64)


class ForeignTexts:
    """Codes of one recording's texts, numbers and JSON. ``values`` are the values by code, as in a ``Scanner``."""

    def __init__(self, names: NameBudget) -> None:
        self.values: list[Any] = ["", None, b""]  # in the order of EMPTY_TEXT, NULL, NO_JSON
        self._names = names
        self._codes: dict[Any, int] = {"": EMPTY_TEXT, None: NULL, b"": NO_JSON}

    def name(self, text: str) -> int:
        """Return the code of a name; the name is made well-formed, and cut if it is very long."""
        return self.code(self._names.kept(text))

    def code(self, value: str | int | bytes) -> int:
        """Return the code of a text, number or JSON."""
        code = self._codes.get(value)
        if code is None:
            code = self._codes[value] = len(self.values)
            self.values.append(value)
        return code

    def meaning(self, text: str) -> Meaning:
        """Return the meaning of a marked range's text, as codes."""
        found = marked_range(text)
        return Meaning(self.code(found.category), self.name(found.name), found.sequence, self.code(found.sizes))

    def numbers(self, values: Int64) -> Int32:
        """Return the codes of numbers."""
        distinct, place = np.unique(values, return_inverse=True)
        return np.array([self.code(value) for value in distinct.tolist()], np.int32)[place]

    def extents(self, columns: Iterable[Int64]) -> Int32:
        """Return the codes of JSON lists, made of three numbers each."""
        distinct, place = np.unique(np.stack(list(columns), axis=1), axis=0, return_inverse=True)
        return np.array([self.code(msgspec.json.encode(row)) for row in distinct.tolist()], np.int32)[place.reshape(-1)]


class ForeignBatch(EventBatch):
    """Complete events ("X") as columns.

    Args:
        start, end: nanoseconds, [rows]. An event that ends before it starts has no length.
        codes: codes of texts and JSON by field, [rows]; a single number applies to all rows.
        numbers: values of number fields by field, [rows].
    """

    def __init__(self, start: Int64, end: Int64, codes: Mapping[str, Int32 | int],
                 numbers: Mapping[str, Int64]) -> None:
        self.events = len(start)
        self.collectives: dict[int, Args] = {}
        self._valid: Bool = (start >= 0) & (start <= _MOST_NS)
        begin = np.where(self._valid, start, 0)
        self._times = begin, np.clip(end, begin, _MOST_NS) - begin
        self._codes, self._numbers = codes, numbers

    def number(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return a field's values in the rows, int64; its default if the recording lacks the field."""
        if name in self._numbers:
            return self._numbers[name][rows]
        return np.full(len(rows), getattr(NO_ARGS, name), np.int64)

    def code(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Return the code of a field in each of the rows."""
        found = self._codes.get(name, _ABSENT[name])
        return np.full(len(rows), found, np.int32) if isinstance(found, int) else found[rows]

    def time(self, name: str, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ``ts`` or ``dur`` of the rows in nanoseconds, int64, and a mask of the valid ones."""
        return self._times[("ts", "dur").index(name)][rows], self._valid[rows]

    def with_args(self, rows: np.ndarray) -> np.ndarray:
        """Return those of the given rows that have arguments."""
        return rows
