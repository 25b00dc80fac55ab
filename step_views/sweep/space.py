"""The space of a sweep: axes, their values, and the configuration of each combination."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import msgspec

from graph_predictor.edits.registry import FACTOR, OPTIONS, EditOption, switched
from graph_predictor.request.study import Configuration
from tracer.errors import ForetraceError
from tracer.guard import MOST_RANKS

Value = str | int | float

MOST_POINTS = 1_000_000  # chosen: more would take days and are more likely a mistake
SIZE = "set:"
"""Prefix of the names of sizes; it separates a size called "device" from the option."""
WORLD_SIZE, SWITCHES, NO_SWITCH = "world_size", "edits", "none"
UNCHANGED = Configuration()
_TEXTS = frozenset({"device", "topology", "parallel", "host_from"})
_SIZE = re.compile(r"(?P<name>\w+)=(?:(?P<old>\d{1,18}):)?(?P<values>\d{1,18}(?:,\d{1,18})*)")


class SweepError(ForetraceError):
    """A sweep is impossible; the message gives the reason."""


@cache
def swept_edits() -> dict[str, EditOption]:
    """Return the edits that are separate axes because they have a value, by the name of the axis."""
    return {option.attribute: option for option in OPTIONS if not option.switches}


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a sweep: a size, device, plan or edit that varies.

    Attributes:
        name: an attribute of ``Configuration``, ``world_size``, an edit with a value, ``edits`` for those without a
            value, or ``set:`` and the name of a size.
        values: at least one, each once.
        old: the recorded value of a size, if it was given.
    """

    name: str
    values: tuple[Value, ...]
    old: int | None = None

    def __post_init__(self) -> None:
        known = self.name in _TEXTS | {WORLD_SIZE, SWITCHES} | set(swept_edits())
        if not known and not self.name.startswith(SIZE):
            raise SweepError(f"{self.name!r} cannot be swept.")
        if not self.values:
            raise SweepError(f"There is no value for {self.title}; give at least one.")
        for value in self.values:  # tables and journals are UTF-8, which has no code for half a surrogate pair
            if isinstance(value, str) and value != (text := value.encode(errors="replace").decode()):
                raise SweepError(f"{self.title} {text!r} is not valid UTF-8; write it in characters.")
        double = [value for value in self.values if self.values.count(value) > 1]
        if double:
            raise SweepError(f"{self.title} has the value {double[0]} twice; give every value once.")

    @classmethod
    def sizes(cls, text: str) -> Axis:
        """Parse "batch=8,16,32" or "batch=32:8,16", where 32 is the recorded size. Raises ``SweepError`` for any other
        form."""
        match = _SIZE.fullmatch(text.strip().replace(" ", ""))
        if match is None:
            raise SweepError(f"{text!r} names no sizes: write them like batch=8,16,32, or batch=32:8,16 with the "
                             "recorded one.")
        old = None if match["old"] is None else int(match["old"])
        return cls(SIZE + match["name"], tuple(int(value) for value in match["values"].split(",")), old)

    @classmethod
    def texts(cls, name: str, text: str) -> Axis:
        """Parse values separated by commas. Raises ``SweepError`` if a value is empty or of the wrong kind."""
        parts = [part.strip() for part in text.split(",")]
        option = "--" + name.replace("_", "-")
        if not all(parts):
            raise SweepError(f"{option} {text!r} has an empty value; write values with commas between them.")
        try:
            if name == WORLD_SIZE:
                return cls(name, tuple(int(part) for part in parts))
            if name in (edits := swept_edits()) and edits[name].takes == FACTOR:
                return cls(name, tuple(float(part) for part in parts))
        except ValueError:
            raise SweepError(f"{option} {text!r} is no list of numbers.") from None
        return cls(name, tuple(parts))

    @property
    def title(self) -> str:
        """Name of the axis's column."""
        return self.name.removeprefix(SIZE)


@dataclass(frozen=True, slots=True)
class Point:
    """One combination: its axes' values by name, and its configuration."""

    values: dict[str, Value]
    configuration: Configuration

    @property
    def key(self) -> str:
        """Return a text that identifies the point within the sweep, the same in every process."""
        return msgspec.json.encode(self.values, order="sorted").decode()

    @property
    def traced(self) -> tuple[object, ...]:
        """Return the part of the configuration that affects tracing: points with equal parts share a trace."""
        own = self.configuration
        return own.parallel or "", own.sizes, own.device or "", own.topology or ""


@dataclass(frozen=True, slots=True)
class SweepSpace:
    """Every combination of the axes.

    Attributes:
        axes: each name once.
        fixed: changes that all points have.

    Raises:
        SweepError: two axes have one name, or there are too many points.
    """

    axes: tuple[Axis, ...]
    fixed: Configuration = UNCHANGED

    def __post_init__(self) -> None:
        titles = [axis.title for axis in self.axes]
        double = [title for title in titles if titles.count(title) > 1]
        if double:
            raise SweepError(f"{double[0]} is swept twice; give all its values in one option.")
        if {"parallel", WORLD_SIZE} <= set(titles):
            raise SweepError("--world-size spreads over data-parallel ranks, --parallel under a plan; give one of "
                             "them.")
        if len(self) > MOST_POINTS:
            raise SweepError(f"These are {len(self):,} points, and {MOST_POINTS:,} are the most; give fewer values.")

    def __len__(self) -> int:
        number = 1
        for axis in self.axes:
            number *= len(axis.values)
        return number

    def __iter__(self) -> Iterator[Point]:
        names = [axis.title for axis in self.axes]
        for values in itertools.product(*(axis.values for axis in self.axes)):
            yield Point(dict(zip(names, values, strict=True)), self._configuration(values))

    def _configuration(self, values: Sequence[Value]) -> Configuration:
        changed: dict[str, object] = {}
        edits = dict(self.fixed.edits)
        sizes = list(self.fixed.sizes)
        for axis, value in zip(self.axes, values, strict=True):
            if axis.name.startswith(SIZE):
                old = "" if axis.old is None else f"{axis.old}:"
                sizes.append(f"{axis.title}={old}{value}")
            elif axis.name == WORLD_SIZE:
                changed["parallel"] = data_parallel(int(value))
            elif axis.name == SWITCHES:
                edits |= {} if value == NO_SWITCH else switched(str(value).split("+"))
            elif axis.name in (swept := swept_edits()):
                edits[swept[axis.name].name] = value
            else:
                changed[axis.name] = value
        return self.fixed.with_values(sizes=tuple(sizes), edits=edits, **changed)


def data_parallel(world_size: int) -> str | None:
    """Return the plan of a data-parallel job; ``None`` for one rank. Raises ``SweepError`` for an impossible number."""
    if not 1 <= world_size <= MOST_RANKS:
        raise SweepError(f"--world-size {str(world_size)[:20]} is no number of ranks; give 1 to {MOST_RANKS:,}.")
    return f"ddp={world_size}" if world_size > 1 else None
