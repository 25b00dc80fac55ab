"""The captures of a directory: what is measured of each, and which old capture each new one is compared with."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from graph_predictor.comm.report import communication_report
from graph_predictor.recorded.facts import active_of_steps
from tracer.capture_layout import COLLECTIVES, CONTEXT, EXECUTION_TRACE, find_parts, read_context
from tracer.errors import ForetraceError
from tracer.files import find_files
from tracer.graph import HOST_READ, LAUNCHING, SHAPE_ONLY, ExecutionGraph, KernelKind, LaunchKind, OpKind
from tracer.input_file import open_input
from tracer.job import Job, read_job

BASELINE = "baseline.json"
ALIKE = 0.5
"""Two captures are of different programs if the larger one has less than this share of the smaller one's operations (by
name and shapes). An added or lost fusion keeps the operations around it; other sizes keep almost none."""

SAME_NAMES = 0.9
"""Two captures are of one program at other sizes if they share this part of the names of their operations. Chosen: a
batch size changes how often samples are fetched, but no name."""


class CheckError(ForetraceError):
    """A check is not possible."""


@dataclass(frozen=True)
class StoredCapture:
    """One recording: a capture's directory, or a directory of ranks' traces.

        name: path within the given directory, with ``/``.
        path: its path on this machine.
        program: the recorded program; repeated runs of a program lie in a directory with the program's name.
        step_region: name of the regions that are steps (``tracer.read_job``); by default the marked steps.
        cycle: recorded steps that make one step; by default the number after which the work repeats.
    """

    name: str
    path: Path
    program: str
    step_region: str | None = None
    cycle: int | None = None

    @cached_property
    def contexts(self) -> list[dict[str, Any]]:
        """``context.json`` of every rank's part; for other traces the directory's own, if there is one."""
        if self.path.is_file():
            return []
        found = [read_context(part.path) for part in find_parts(self.path)] or [read_context(self.path)]
        return [each for each in found if each]

    @property
    def files(self) -> list[Path]:
        """The traces and their side files, in order of name."""
        parts = find_parts(self.path)
        if parts:
            side = [part.path / name for part in parts for name in (CONTEXT, COLLECTIVES, EXECUTION_TRACE)]
            return sorted([window for part in parts for window in part.windows] + [p for p in side if p.is_file()])
        if self.path.is_file():
            return [self.path]
        return sorted(_traces(self.path))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the files."""
        total = hashlib.sha256()
        for path in self.files:
            with open_input(path) as stream:
                total.update(hashlib.file_digest(stream, "sha256").digest() if hasattr(hashlib, "file_digest") else
                             hashlib.sha256(stream.read()).digest())
        return total.hexdigest()

    @cached_property
    def job(self) -> Job:
        """The recorded job, read once. Raises ``CheckError`` if it is empty, truncated, or without times."""
        try:
            if find_parts(self.path):
                job = read_job(self.path, step_region=self.step_region, cycle=self.cycle)
            else:
                job = read_job([os.fspath(path) for path in self.files], step_region=self.step_region,
                               cycle=self.cycle)
        except ForetraceError as error:
            raise CheckError(f"The capture {self.name} cannot be read: {error}") from error
        if not any(len(graph.ops) or len(graph.kernels) for graph in job.graphs):
            raise CheckError(f"The capture {self.name} is empty: its trace has no operations and no kernels; record it "
                             "again with foretrace capture.")
        if torn := [graph.meta.source for graph in job.graphs if graph.meta.loss.truncated_bytes]:
            raise CheckError(f"The capture {self.name} is damaged: {torn[0]} ends too early, and what it lost would "
                             "pass for work that is no longer done; copy or record it again.")
        if any(graph.meta.era == SHAPE_ONLY for graph in job.graphs):
            raise CheckError(f"{self.name} was traced by shapes alone and has no measured times; a directory to check "
                             "holds recordings (foretrace capture). Limits without a GPU are set in tests (pytest).")
        if not any(len(graph.steps) for graph in job.graphs):
            raise CheckError(f"The capture {self.name} has no steps: name the region that marks them with "
                             "--step-region, call prof.step() after each iteration, or record it with "
                             "foretrace capture.")
        return job

    @property
    def workload(self) -> str:
        """Name of the workload if it is one of the suite; else ""."""
        return str(self._workload.get("name", ""))

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the workload."""
        found = self._workload.get("settings")
        return found if isinstance(found, dict) else {}

    @property
    def _workload(self) -> dict[str, Any]:
        value = self.contexts[0].get("workload") if self.contexts else None
        return value if isinstance(value, dict) else {}


def find_captures(directory: str, step_region: str | None = None, cycle: int | None = None) -> list[StoredCapture]:
    """Return the captures in a directory, by name; or the directory itself, if it is a capture.

    Each directory in it is a program: a capture, or several captures of the same run. ``step_region`` and ``cycle`` are
    set for all of them (``StoredCapture``). Raises ``CheckError`` if the directory does not exist or has no capture.
    """
    root = Path(directory)
    if not directory or not root.exists():
        raise CheckError(f"{directory or 'The empty path'} does not exist; check the path.")
    if not root.is_dir() and not root.is_file():
        raise CheckError(f"{directory} is a pipe or device; name a directory of captures.")
    name = root.resolve().name
    if root.is_file() or _is_capture(root):
        return [StoredCapture(name, root, name, step_region, cycle)]
    found = []
    for path in sorted(each for each in root.iterdir() if each.is_dir()):
        if _is_capture(path):
            found.append(StoredCapture(path.name, path, path.name, step_region, cycle))
            continue
        found += [StoredCapture(f"{path.name}/{run.name}", run, path.name, step_region, cycle)
                  for run in sorted(path.iterdir()) if run.is_dir() and _is_capture(run)]
    if not found:
        raise CheckError(f"{directory} holds no capture: neither it nor a directory in it has traces; record some with "
                         "foretrace capture --out, one directory each.")
    return found


def _is_capture(path: Path) -> bool:
    if find_parts(path):
        return True
    # A directory of traces, but not a directory of captures with a stray file.
    return bool(_traces(path)) and not any(child.is_dir() and find_parts(child) for child in path.iterdir())


def _traces(path: Path) -> list[Path]:
    try:
        files = find_files([os.fspath(path)], [])
    except ForetraceError:
        return []
    return [Path(file.path) for file in files if Path(file.path).name != BASELINE]


def operations(job: Job) -> Counter[tuple[str, str]]:
    """Return how often each operation, by name and shapes, runs in a step, over all recorded ranks."""
    found: Counter[tuple[str, str]] = Counter()
    for graph in job.graphs:
        found.update(operations_of_rank(graph))
    return found


def operations_of_rank(graph: ExecutionGraph) -> Counter[tuple[str, str]]:
    """Return how often each operation, by name and shapes, runs in a step of a rank."""
    steps = max(len(graph.steps), 1)
    return Counter({key: max(1, round(number / steps)) for key, number in _by_name_and_shapes(graph).items()})


def _by_name_and_shapes(graph: ExecutionGraph) -> Counter[tuple[str, str]]:
    ops = graph.ops
    rows = (ops.kind == OpKind.OPERATION) & (ops.step >= 0)
    pairs = Counter(zip(ops.name[rows].tolist(), ops.shapes[rows].tolist(), strict=True))
    return Counter({(graph.string(name), graph.string(shapes)): number for (name, shapes), number in pairs.items()})


def likeness(one: Job, other: Job) -> float:
    """Return the share of the smaller program's operations, by name and shapes, that the larger program has too."""
    a, b = operations(one), operations(other)
    if not a or not b:  # traces with device work only
        a, b = _kernel_checks(one), _kernel_checks(other)
    least = min(a.total(), b.total())
    return (a & b).total() / least if least else 0.0


def _kernel_checks(job: Job) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for graph in job.graphs:
        found.update((graph.string(name), "") for name in graph.kernels.name.tolist())
    return found


def at_other_sizes(one: Job, other: Job) -> bool:
    """Return whether two jobs run operations of the same names but mostly of other sizes."""
    if likeness(one, other) >= ALIKE:
        return False
    names = [{name for name, _ in operations(job)} for job in (one, other)]
    return len(names[0] & names[1]) >= SAME_NAMES * len(names[0] | names[1]) > 0


@dataclass(frozen=True)
class Pair:
    """The old and the new captures of one program; captures of one side are repeated runs."""

    program: str
    old: list[StoredCapture]
    new: list[StoredCapture]


def pair_captures(old: list[StoredCapture], new: list[StoredCapture]) -> list[Pair]:
    """Return old and new captures by program, in the old ones' order; programs without a new capture are left out.

    A workload of the suite is identified by its name and settings. Any other program is identified by its directory's
    name or, if no old capture has this name, by its operations. Raises ``CheckError`` if a new capture's program has no
    old capture, or is the same workload with other settings.
    """
    programs: dict[str, list[StoredCapture]] = {}
    for capture in old:
        programs.setdefault(capture.program, []).append(capture)
    found: dict[str, list[StoredCapture]] = {}
    for capture in new:
        found.setdefault(_partner(capture, programs), []).append(capture)
    pairs = [Pair(program, programs[program], found[program]) for program in programs if program in found]
    for pair in pairs:
        was, now = (side[0].job.graphs[0].meta.cycle for side in (pair.old, pair.new))
        if was != now:
            raise CheckError(f"{pair.program}: a step of the baseline's capture is {_cycle(was)}, one of the new "
                             f"capture's {_cycle(now)}, so that they cannot be compared; record two whole cycles of "
                             "both, or say how many steps are one with --cycle.")
    return pairs


def _cycle(steps: int) -> str:
    return "one recorded step" if steps == 1 else f"a cycle of {steps} recorded steps"


def _partner(new: StoredCapture, programs: dict[str, list[StoredCapture]]) -> str:
    first = {program: runs[0] for program, runs in programs.items()}
    if new.workload:
        same = {program: each for program, each in first.items() if each.workload == new.workload}
        exact = [program for program, each in same.items() if each.settings == new.settings]
        if exact:
            return new.program if new.program in exact else exact[0]
        if same:
            program, each = next(iter(same.items()))
            raise CheckError(f"{new.path} and the baseline's {program} record different programs: {new.workload} with "
                             f"{_differing(new.settings, each.settings)}; record it with the baseline's settings.")
    if new.program in first:
        share = likeness(first[new.program].job, new.job)
        if share < ALIKE and not at_other_sizes(first[new.program].job, new.job):
            raise CheckError(f"{new.path} and the baseline's {new.program} record different programs: they share "
                             f"{share:.0%} of their operations (by name and shapes); compare captures of one program "
                             "at the same sizes.")
        return new.program
    shares = sorted(((likeness(each.job, new.job), program) for program, each in first.items()), reverse=True)
    share, best = shares[0]
    if share < ALIKE:
        raise CheckError(f"{new.path} is of none of the baseline's programs: with the nearest, {best}, it shares "
                         f"{share:.0%} of its operations (by name and shapes); compare captures of one program at the "
                         "same sizes.")
    if len(shares) > 1 and shares[1][0] > 0.95 * share:
        raise CheckError(f"{new.path} could be {best} or {shares[1][1]}: name its directory like the one that is "
                         "meant.")
    return best


def _differing(new: dict[str, Any], old: dict[str, Any]) -> str:
    names = [name for name in sorted(new.keys() | old.keys()) if new.get(name) != old.get(name)]
    return ", ".join(f"{name}={new.get(name)} where the baseline has {old.get(name)}" for name in names[:4])


Number = Annotated[int, msgspec.Meta(ge=0)]
"""A number of calls, bytes or nanoseconds: 0 or more."""
Times = Annotated[list[Annotated[int, msgspec.Meta(gt=0)]], msgspec.Meta(min_length=1)]
"""Times of steps, ns."""


class Environment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The machine and software of a recording; "" and 0 for unknown values."""

    device: str = ""
    cpu: str = ""
    cores: int = 0
    threads: int = 0
    world_size: int = 1
    torch: str = ""

    def other_machine(self, other: Environment) -> str:
        """Return as text the differences that make times incomparable; "" if there are none."""
        names = ("device", "cpu", "cores", "threads", "world_size")
        unlike = [f"{name.replace('_', ' ')} {getattr(self, name)} → {getattr(other, name)}" for name in names
                  if getattr(self, name) and getattr(other, name) and getattr(self, name) != getattr(other, name)]
        return ", ".join(unlike)

    def fewer_threads(self, other: Environment) -> str:
        """Return as text that the other one's operations run on fewer threads of an equal processor; else ""."""
        same = all(getattr(self, name) == getattr(other, name) for name in ("device", "cpu", "cores", "world_size"))
        return f"threads: {self.threads} → {other.threads}" if same and 0 < other.threads < self.threads else ""


class Count(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A count per step: that of the typical step, whether more than half of the steps have it, and the largest."""

    typical: Number
    steady: bool
    most: Number


class Run(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One capture's measurements, nanoseconds and bytes.

    Attributes:
        recorded: date of the recording.
        step_ns: times of steps without the profiler; if there are none, under the profiler (``profiled``).
        profiled_ns: times of the recorded steps, under the profiler.
        gpu_active_ns: for each recorded step, time in which device work except collectives ran; empty without any.
        peak_device_bytes: most memory allocated on the device; 0 if unknown.
        peak_host_bytes: most resident memory of the process; 0 if unknown.
    """

    recorded: str
    step_ns: Times
    profiled: bool
    profiled_ns: Times
    gpu_active_ns: list[Number]
    peak_device_bytes: Number
    peak_host_bytes: Number


COUNTS = ("operations", "host_reads", "launches", "kernels", "blocking_syncs", "collectives", "communicated_bytes")
"""Names of the counts, for a step over all recorded ranks; ``communicated_bytes`` are those of the mean rank."""


@dataclass(frozen=True, slots=True)
class MeasuredProgram:
    """All measurements of a capture."""

    environment: Environment
    counts: dict[str, Count]
    run: Run


def measure(capture: StoredCapture) -> MeasuredProgram:
    """Measure a capture. Raises ``CheckError`` if it is empty, truncated, or without times."""
    job = capture.job
    return MeasuredProgram(environment_of(capture), count_steps(job.graphs), _run(capture, job))


def environment_of(capture: StoredCapture) -> Environment:
    """Return the machine and software of a capture."""
    job = capture.job
    context = capture.contexts[0] if capture.contexts else {}
    hardware = context.get("hardware") if isinstance(context.get("hardware"), dict) else {}
    meta = job.graphs[0].meta
    return Environment(
        device=meta.device or str((hardware or {}).get("device", "")), cpu=str((hardware or {}).get("cpu", "")),
        cores=_whole((hardware or {}).get("cores_usable", (hardware or {}).get("cores"))),
        threads=_whole(context.get("torch_threads")), world_size=max(job.world_size, 1), torch=meta.torch_version)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def _run(capture: StoredCapture, job: Job) -> Run:
    timed = [graph.meta.unprofiled_step_ns for graph in job.graphs if graph.meta.unprofiled_step_ns]
    recorded = [graph.steps.duration_ns.tolist() for graph in job.graphs if len(graph.steps)]
    active = [_active(graph) for graph in job.graphs]
    memory = [each["peak_memory"] for each in capture.contexts if isinstance(each.get("peak_memory"), dict)]
    return Run(
        recorded=str(capture.contexts[0].get("recorded", "")) if capture.contexts else "",
        step_ns=_slowest(timed or recorded), profiled=not timed, profiled_ns=_slowest(recorded),
        gpu_active_ns=_slowest([each for each in active if each]),
        peak_device_bytes=max((_whole(each.get("allocated_bytes")) for each in memory), default=0),
        peak_host_bytes=max((_whole(each.get("host_bytes")) for each in memory), default=0))


def _active(graph: ExecutionGraph) -> list[int]:
    """Return for each step the time in which device work other than collectives ran, ns; empty without device work."""
    found: list[int] = active_of_steps(graph).max(axis=0).tolist() if len(graph.kernels) else []
    return found


def _slowest(ranks: list[list[int]]) -> list[int]:
    """Return the slowest rank's time in each step if all ranks have equally many; else the times of the slowest
    rank."""
    if not ranks:
        return []
    if len({len(rank) for rank in ranks}) == 1:
        return [max(step) for step in zip(*ranks, strict=True)]
    return max(ranks, key=lambda rank: float(np.median(rank)))


def count_steps(graphs: list[ExecutionGraph]) -> dict[str, Count]:
    """Return ``COUNTS`` of a job's ranks, which may be recorded or synthetic."""
    found = {name: _added([counter(graph) for graph in graphs]) for name, counter in _COUNTERS.items()}
    report = communication_report(graphs)
    ranks = max(len(graphs), 1)
    size = round(sum(row.payload_bytes for row in report.traffic) / ranks / max(report.steps, 1.0))
    found["communicated_bytes"] = Count(size, True, size)
    return found


def _added(ranks: list[np.ndarray]) -> Count:
    """Return the sum of the ranks' counts step by step; steps are matched in order."""
    most = max((len(rank) for rank in ranks), default=0)
    total = np.zeros(most, np.int64)
    for rank in ranks:
        if len(rank):
            # A rank with fewer steps repeats its last step.
            total += np.concatenate([rank, np.full(most - len(rank), rank[-1], np.int64)])
    if not most:
        return Count(0, True, 0)
    typical = int(np.sort(total)[(most - 1) // 2])
    return Count(typical, 2 * int((total == typical).sum()) > most, int(total.max()))


def _per_step(graph: ExecutionGraph, step: np.ndarray) -> np.ndarray:
    steps = len(graph.steps)
    return np.bincount(step[(step >= 0) & (step < steps)], minlength=steps)


def _host_reads(graph: ExecutionGraph) -> np.ndarray:
    codes = [code for code, text in enumerate(graph.strings) if text == HOST_READ]
    return _per_step(graph, graph.ops.step[np.isin(graph.ops.name, codes)])


def _collectives(graph: ExecutionGraph) -> np.ndarray:
    table = graph.collectives
    step = np.where(table.op >= 0, graph.ops.step[table.op] if len(graph.ops) else -1, -1)
    if len(graph.kernels):
        step = np.where((step < 0) & (table.kernel >= 0), graph.kernels.step[table.kernel], step)
    return _per_step(graph, step)


_COUNTERS: dict[str, Callable[[ExecutionGraph], np.ndarray]] = {
    "operations": lambda graph: _per_step(graph, graph.ops.step[graph.ops.kind == OpKind.OPERATION]),
    "host_reads": _host_reads,
    "launches": lambda graph: _per_step(graph, graph.launches.step[np.isin(graph.launches.kind, LAUNCHING)]),
    "kernels": lambda graph: _per_step(graph, graph.kernels.step[graph.kernels.kind != KernelKind.COLLECTIVE]),
    "blocking_syncs": lambda graph: _per_step(
        graph, graph.launches.step[graph.launches.kind == LaunchKind.BLOCKING_SYNC]),
    "collectives": _collectives}
