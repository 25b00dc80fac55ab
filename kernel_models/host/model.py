"""``HostModel``: the host time of a step that never ran, from steps of other programs on the same host.

An event (``HostMoment``) is an operation's own time, or the time before it. In program p the event e, of n tensors,
after c calls of Python functions, costs

    ns = cold(e) · (base(e) · python(c) + slope(e) · n)
    cold = 1 + 2.7 · log(1 + computed / 4.3 µs), or where a GPU computes exp(0.2 · log₂ max(events / 8, 1))

*Base*: the cost of the event itself (an operation in its phase; the time between two given operations). Where few
programs have the event, its cost is mixed with that of its kind: ``log base = (n · own + pool) / (n + 1)`` over n
programs, pool by pool. *Cold*: a host's own computation fills its caches with other data. Code costs more, the more was
computed since an operation of its name last ran, around the end of the step. Where a GPU computes, only other code
fills them: the number of events since the equal event counts. *Tensors*: an optimizer's list operations, and the Python
around them, cost a fixed time for each tensor. The four special events cost such a time for each parameter or node of
autograd. *Calls*: no name shows the work of a model's own Python between two operations. It grows with its calls, and a
call costs less where there are many: ``python = ((c + 3) / 13)^0.85``, and 1 without any. For a step whose calls were
not counted python is 1. ``HostModel.counted`` is the fit with calls. It uses programs with counted calls; from all
others it uses the operations' own time, and the events before backward, before the optimizer and at the end.

Shared overheads as such, means by kind of launch, are from Lin et al. (2022). Constants here were chosen with the
programs of ``traces/host``, never with the held-out ``traces/host-held-out``, on which accuracy is reported
(``benchmarks/host_model.py``); ``kernel_models.host.fitting`` fits.
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import numpy as np

from kernel_models.host.events import HostStep, Label, host_events, is_sharded, pools_of, unsharded
from tracer.arrays import Float64
from tracer.errors import ForetraceError
from tracer.input_file import DecodeError, convert, from_json
from tracer.output_file import whole_file

POOL_WEIGHT = 1.0
"""Weight of the pool of an event's kind, as a number of programs."""
FIRST_CALLS, USUAL_CALLS, CALLS_POWER = 3.0, 10.0, 0.85
"""Calls of Python added to any count; the number for which base costs hold; and the power of the growth of costs. Ten
calls cost 2.7 times as much as one, 150 eight times as much as ten."""
LAW = 3
"""Version of the files' numbers. Version 1 counted coldness by events instead of by computed time; 2 did not
distinguish the ends of a step by optimizer."""

T = TypeVar("T", float, Float64)


@dataclass(frozen=True, slots=True)
class Pool:
    """Known cost of a label: logarithm of its base (ns), number of labels it pools, and number of programs."""

    log_base: float
    labels: int
    programs: int


@dataclass(frozen=True, slots=True)
class HostModel:
    """Host model fitted to steps of programs of one host; see the module's text.

    Attributes:
        pools: By label.
        slopes: Cost per tensor, ns, by an event's label; of other labels under "own" and "before", their first part.
        offset: Logarithm of the factor on all bases.
        spread: Log half width of the 80% interval of an unseen program's host time.
        launch_ns: Time of one launch, ns; 0 where none was recorded.
        programs: Number of programs in the fit.
        host: Name of the host.
        with_calls: Whether it is the fit for steps in which calls of Python functions were counted.
        counted: Fit of this host with the calls; ``None`` where too few of its programs had their calls counted.
    """

    pools: dict[Label, Pool]
    slopes: dict[Label, float]
    offset: float
    spread: float
    launch_ns: float
    programs: int
    host: str = ""
    with_calls: bool = False
    counted: HostModel | None = None

    def suited(self, has_calls: bool) -> HostModel:
        """Return the fit for a step with counted calls of Python functions, or for one without."""
        return self.counted if has_calls and self.counted is not None else self

    def estimate(self, step: HostStep) -> tuple[Float64, Float64]:
        """Return the time before each operation and after the last one, [n + 1], and in each, [n], ns. Times stored in
        ``step`` are ignored."""
        if step.calls is not None and self.counted is not None:
            return self.counted.estimate(step)
        factor = math.exp(self.offset)
        known: dict[Label, tuple[float, float]] = {}
        found = np.zeros(2 * len(step) + 1)
        for event in host_events(step, self.with_calls):
            if event.label not in known:
                known[event.label] = factor * self._base(event.label), self._slope(event.label)
            base, slope = known[event.label]
            found[event.place] = event.cold * (base * python_cost(event.calls) + slope * event.tensors)
        return found[0::2], found[1::2]

    def knows(self, step: HostStep) -> Float64:
        """Return whether the model has the own label of each event, in the order (before, in, before, …)."""
        found = np.zeros(2 * len(step) + 1)
        for event in host_events(step, self.with_calls):
            found[event.first:event.place + 1] = event.label in self.pools
        return found

    def _slope(self, label: Label) -> float:
        return self.slopes.get(label, self.slopes.get(label[:1], 0.0))

    def _base(self, label: Label) -> float:
        found = self.log_base(label)
        return 0.0 if found is None else float(np.exp(found))

    def log_base(self, label: Label) -> float | None:
        """Return the logarithm of a label's base (ns, before the offset), mixed with the pools above it; ``None`` where
        the model has none of them."""
        found: float | None = None
        for pool in reversed(above(label)):
            if (known := self.pools.get(pool)) is None:
                continue
            count = known.programs if pool == label else known.labels
            found = known.log_base if found is None else drawn_together(float(count), known.log_base, found)
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return the model as plain values, for a file."""
        return {"host": self.host, "law": LAW, "offset": self.offset, "spread": self.spread,
                "launch_ns": self.launch_ns, "programs": self.programs, "with_calls": self.with_calls,
                "counted": None if self.counted is None else self.counted.to_dict(),
                "pools": [[list(label), round(pool.log_base, 4), pool.labels, pool.programs]
                          for label, pool in self.pools.items()],
                "slopes": [[list(label), round(slope, 3)] for label, slope in self.slopes.items()]}

    @classmethod
    def from_dict(cls, state: Any) -> HostModel:
        """Return the model that ``to_dict`` stored. Raises ``ForetraceError`` for other values."""
        try:
            found = convert(state, _State)
        except DecodeError as error:
            raise ForetraceError(f"The host model is not in the form foretrace writes ({error}): the file is damaged "
                                 "or of another version; fit it again.") from None
        return cls._of(found)

    @classmethod
    def _of(cls, found: _State) -> HostModel:
        return cls({tuple(label): Pool(base, labels, programs) for label, base, labels, programs in found.pools},
                   {tuple(label): slope for label, slope in found.slopes}, found.offset, found.spread,
                   found.launch_ns, found.programs, found.host, found.with_calls,
                   None if found.counted is None else cls._of(found.counted))


_Log = Annotated[float, msgspec.Meta(ge=-50.0, le=50.0)]  # chosen: e^50 ns are 160,000 years
_Spread = Annotated[float, msgspec.Meta(ge=0.0, le=5.0)]  # chosen: a factor of 148 either way is no information
_Ns = Annotated[float, msgspec.Meta(ge=0.0, le=1e12)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


class _State(msgspec.Struct):
    """The stored form of a ``HostModel``, as ``to_dict`` returns it."""

    host: str
    law: Literal[3]
    offset: _Log
    spread: _Spread
    launch_ns: _Ns
    programs: _Count
    pools: list[tuple[list[str], _Log, _Count, _Count]]
    slopes: list[tuple[list[str], float]]
    with_calls: bool = False
    counted: _State | None = None


def above(label: Label) -> list[Label]:
    """Return the pools that describe a label, from itself to the widest."""
    return [*pools_of(label), *(pools_of(unsharded(label)) if is_sharded(label) else ())]


def drawn_together(count: T, log_base: T, pool: T) -> T:
    """Return the logarithm of a base that ``count`` labels show, mixed with that of the pool above it."""
    return (count * log_base + POOL_WEIGHT * pool) / (count + POOL_WEIGHT)


def python_cost(calls: float) -> float:
    """Return the factor on the cost of an event with ``calls`` calls of Python."""
    return ((calls + FIRST_CALLS) / (USUAL_CALLS + FIRST_CALLS)) ** CALLS_POWER if calls > 0 else 1.0


HOSTS = Path(__file__).resolve().parent / "models"
CPU_HOST, GPU_HOST, PLANS_HOST = "cpu-steps", "gpu-steps", "cpu-plans"
"""Hosts whose own operations compute (2 cores of an AMD EPYC); hosts of GPUs (published traces); the first with further
programs under DDP and FSDP, which show their hooks."""
_MOST_BYTES = 1 << 26
"""Chosen: far above any host's file."""
_BEGINS = b'{"host":'


def host_names() -> list[str]:
    """Return the names of shipped host models."""
    return sorted(path.name.removesuffix(".json.gz") for path in HOSTS.glob("*.json.gz"))


@lru_cache(maxsize=8)
def shipped_host(name: str) -> HostModel:
    """Return a shipped model by its name."""
    return read_host(HOSTS / f"{name}.json.gz")


def read_host(path: Path) -> HostModel:
    """Return the model of a file. Raises ``ForetraceError`` for a file without a host model."""
    try:
        with gzip.open(path, "rb") as stream:
            text = stream.read(_MOST_BYTES)
        return HostModel.from_dict(from_json(text))
    except (OSError, EOFError, zlib.error, DecodeError) as error:
        raise ForetraceError(f"{path} cannot be read as a host model ({error}); fit it again.") from None


def is_host_file(name: str) -> bool:
    """Return whether a path names a file that ``write_host`` wrote, by its first bytes."""
    path = Path(name)
    try:
        if not path.is_file():
            return False
        with gzip.open(path, "rb") as stream:
            return stream.read(len(_BEGINS)) == _BEGINS
    except (OSError, EOFError, ValueError, zlib.error):
        return False


def write_host(model: HostModel, path: Path) -> None:
    """Write a model to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as stream:
        stream.write(gzip.compress(json.dumps(model.to_dict(), separators=(",", ":")).encode(), mtime=0))
