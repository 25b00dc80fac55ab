"""The memory of a program, traced by shapes: over its operations, and the largest size that fits a device.

For the largest size (``fit_batch``) the program is traced at a few sizes. Its peak grows linearly with the samples, so
the next size to try is where the line through the last two sizes reaches the device's memory. The search ends with a
traced size that fits, while the next size was traced and does not fit. A trace cannot show contexts and fragmentation;
they are added as in a plan's estimate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from graph_predictor.prediction.scenario import EditError
from graph_predictor.request.memory_fit import StageMemory, fit_of, with_waste
from graph_predictor.request.study import DEFAULT_DEVICE
from graph_predictor.sizes.retrace import MOST, parse_settings, trace_again, way_again
from kernel_models.device import DeviceSpec, find_device, shape_device
from tracer.device_memory import MemoryAccount, MemoryTimeline, binary_size, memory_timeline
from tracer.graph import ExecutionGraph
from tracer.lazy import pandas as pd
from tracer.shown import Chart, ChartSeries, Shown

MOST_TRIES = 40  # chosen; each try traces a step
FARTHEST = 64
"""Greatest ratio of a size to try to the largest size before it."""
FIRST = 8
"""First size to try if neither the caller nor the program's settings give one."""
_HALVE = 2  # chosen: every third try halves the interval, since estimates may approach slowly


@dataclass(frozen=True, repr=False)
class FitBatch(Shown):
    """Sizes that were tried, and the largest that fits.

    Attributes:
        name: name of the size, such as "batch".
        device: name of the device; limit_bytes: its memory.
        tried: size → memory, in the order of sizes.
        fits: the largest size that surely fits; ``None`` if none does.
        may_fit: the largest size that is expected to fit; with more waste than expected it does not.
    """

    name: str
    device: str
    limit_bytes: float
    tried: Mapping[int, StageMemory]
    fits: int | None
    may_fit: int | None

    def headline(self) -> str:
        """Return the largest size in one line."""
        on = f"{self.device} with {self.limit_bytes / 1e9:,.4g} GB"
        if self.may_fit is None:
            return f"no {self.name} fits {on}: one takes {self.tried[min(self.tried)].account}"
        surely = f"{self.name} {self.fits:,} fits" if self.fits is not None else f"no {self.name} surely fits"
        more = f", {self.may_fit:,} may" if self.may_fit != self.fits else ""
        return f"{surely} {on}{more}"

    def tables(self) -> Mapping[str, Callable[[], pd.DataFrame]]:
        """Return ``tried``: every size that was traced, its expected, least and most bytes, and whether it fits."""
        return {"tried": lambda: pd.DataFrame([{
            self.name: size, "low_bytes": round(memory.low), "bytes": round(memory.account.total),
            "high_bytes": round(memory.high), "fit": fit_of(memory, self.limit_bytes).value,
            **{f"{part}_bytes": round(held) for part, held in memory.account.parts.items()}}
            for size, memory in self.tried.items()])}

    def chart(self) -> Chart:
        """Return the memory of each size that was traced, least to most, and the device's."""
        every = list(self.tried.values())
        return Chart("lines", self.headline(), list(self.tried), [ChartSeries(
            "expected", [one.account.total / 2**30 for one in every], [one.low / 2**30 for one in every],
            [one.high / 2**30 for one in every])], "GiB", self.name, [(self.limit_bytes / 2**30, self.device)])

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"size": self.name, "device": self.device, "limit_bytes": self.limit_bytes, "fits": self.fits,
                "may_fit": self.may_fit, "tried": self.to_pandas().to_dict("records")}


def fit_batch(graph: ExecutionGraph | None, device: str | DeviceSpec, *, name: str = "batch", code: str | None = None,
              sizes: Sequence[str] = (), limit_bytes: float | None = None, first: int | None = None,
              selected: float | None = None) -> FitBatch:
    """Return the largest size that fits, found by tracing the program at several sizes.

    Args:
        graph: a step of a workload of the suite, recorded or traced; ``None`` if ``code`` is given.
        device: name or figures of the device.
        name: name of the size.
        code: "train.py:build", a function that takes the size by name and returns the step.
        sizes: other sizes to set, such as "seq=1024".
        limit_bytes: memory of the device; by default from its figures.
        first: the first size to try.
        selected: share of elements that masks made of data select.

    Raises:
        EditError: there is no program to trace, the device's memory is unknown, or the step uses no device memory, or
            memory that does not grow with the size.
        ShapeOnlyError: the program has no such size, or cannot be traced.
    """
    spec = find_device(device) if isinstance(device, str) else device
    if code is None and (graph is None or not graph.meta.workload):
        raise EditError("What a step needs at another size is found by tracing its program, and nothing says where "
                        "that is: give the function that builds the step (SCRIPT.py:FUNCTION, or --code)."
                        + ("" if graph is None else f" {way_again(graph, (name,))}".rstrip()))
    limit = limit_bytes if limit_bytes is not None else spec.memory_gb * 1e9
    if not limit > 0:
        raise EditError(f"Nothing is known of the memory of {spec.name}; give it with --memory-limit.")
    _, others = parse_settings(sizes)
    if name in others:
        raise EditError(f"{name} is the size that is sought; leave it out of --set.")
    target = shape_device(spec)
    tried: dict[int, StageMemory] = {}

    def memory(size: int) -> StageMemory:
        if size not in tried:
            traced = trace_again(graph, {**others, name: size}, target, code, selected)
            account = MemoryAccount.of_trace(traced.meta.memory)
            if not account.total:
                raise EditError(f"The step keeps nothing in the memory of {spec.name}, as its model stayed on the CPU: "
                                'move model and batch with .cuda() or .to("cuda").')
            tried[size] = with_waste(account)
        return tried[size]

    settings = {} if graph is None else graph.meta.workload.get("settings", {})
    begin = first or settings.get(name)
    may = _largest(lambda size: memory(size).account.total, limit, begin if isinstance(begin, int) else FIRST)
    if may == MOST:
        raise EditError(f"Any {name} fits {spec.name}: the step's memory hardly grows with {name}. Look whether the "
                        "function that builds the step makes its batch by it.")
    fits = None if may is None else _largest(lambda size: memory(size).high, limit, may)
    return FitBatch(name, spec.name, limit, dict(sorted(tried.items())), fits, may)


def _largest(needed: Callable[[int], float], limit: float, begin: int) -> int | None:
    """Return the largest size whose ``needed`` memory is within the limit; ``None`` if size 1 needs too much. The need
    must grow with the size.

    Both the returned size and the next one are tried.
    """
    low, high = 0, MOST + 1
    at = max(1, min(begin, MOST))
    known: dict[int, float] = {}
    for turn in range(MOST_TRIES):
        known[at] = needed(at)
        if known[at] <= limit:
            low = max(low, at)
        else:
            high = min(high, at)
        if high - low <= 1:
            break
        at = _next(known, limit, low, high, halve=turn % 3 == _HALVE)
    return low or None


def _next(known: Mapping[int, float], limit: float, low: int, high: int, *, halve: bool) -> int:
    """Return the next size to try: where the line through the two sizes nearest the limit reaches it, between ``low``,
    which fits, and ``high``, and not far beyond tried sizes. ``halve`` takes the middle instead."""
    least, most = low + 1, high - 1
    if high > MOST:
        most = min(most, FARTHEST * max(known))
    elif halve:
        return (low + high) // 2
    nearest = sorted(known, key=lambda size: abs(known[size] - limit))[:2]
    guess = most if high > MOST else (low + high) // 2
    if len(nearest) == 2 and (slope := (known[nearest[0]] - known[nearest[1]]) / (nearest[0] - nearest[1])) > 0:
        guess = int(nearest[0] + (limit - known[nearest[0]]) / slope)
        if guess in known:  # then try its neighbour on the side that is open
            guess += 1 if known[guess] <= limit else -1
    return min(max(guess, least), most)


def said_sizes(found: FitBatch) -> str:
    """Return a sentence on the memory of the size that was found."""
    size = found.fits if found.fits is not None else found.may_fit
    if size is None:
        return ""
    memory = found.tried[size]
    return (f"{found.name} {size:,} takes {memory.account}; {binary_size(memory.low)} to {binary_size(memory.high)} in "
            "all")


def program_memory(graph: ExecutionGraph | None, code: str | None = None, sizes: Sequence[str] = (),
                   device: str | None = None, selected: float | None = None) -> MemoryTimeline:
    """Return what the device's memory holds while the program runs, by shapes alone: nothing is run.

    Args:
        graph: a recorded step of the program, or of a workload of the suite unless ``code`` is given.
        code: "train.py:build", a function that builds the step.
        sizes: other sizes, such as "batch=64".
        device: name of the device; by default the recorded one.
        selected: share of elements that masks made of data select.

    Raises:
        ForetraceError: the program cannot be traced, or keeps nothing in the device's memory.
    """
    spec = find_device(device or (graph.meta.device if graph is not None and graph.meta.device else DEFAULT_DEVICE))
    return memory_timeline(trace_again(graph, parse_settings(sizes)[1], shape_device(spec), code, selected))
