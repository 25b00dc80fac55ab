"""The directory of a captured job, and its ``context.json`` read into ``Meta``. Needs no torch.

- OUT/rank0/context.json: Hardware, versions, step times; its "complete" marks a whole capture.
- OUT/rank0/kineto.json.gz: The profiler's trace; a second window is kineto-1.json.gz, and so on.
- OUT/rank0/et.json.gz: The execution trace of all windows.
- OUT/rank0/collectives.json: What the profiler does not record about collectives (absent where it does).
- OUT/rank0/lookups.json: How rows of embedding tables are looked up (absent unless asked for).
- OUT/rank0/python-calls.json: Calls of Python between operations (absent unless asked for).
- OUT/rank0/graph.foretrace: Replaces the five files above, in the one-file form (graph-1.foretrace, …).
- OUT/rank1/…: The files of the next rank.

A directory that holds these files directly, without ``rank<r>``, is a part too. Under these names, pipes, devices,
directories, links to them and links to files of no capture are not read. A note reports them, if the capture is still
of use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tracer import kineto, workloads
from tracer.errors import ForetraceError, StepRegionError, TraceError
from tracer.fake_world.streams import note_overlap
from tracer.graph import LEAST_STEP_NS, NONE, ExecutionGraph, ProgramNote
from tracer.input_file import DecodeError, PathLike, from_json, read_input, why_not_read
from tracer.join import join_execution_trace
from tracer.lookup_data.noted import note_tables, tables_of
from tracer.ranks import Span, checked_classes
from tracer.store.graphs import load_graph

CONTEXT = "context.json"
COLLECTIVES = "collectives.json"
LOOKUPS = "lookups.json"
PYTHON_CALLS = "python-calls.json"
EXECUTION_TRACE = "et.json.gz"
SIDE_FILES = frozenset({CONTEXT, COLLECTIVES, LOOKUPS, PYTHON_CALLS})
"""Files of a part that are no traces."""

_MOST_STEP_NS = 1 << 50
"""Some 12 days: longer steps are damage."""
RUN_AHEAD = 0.01
"""Relative difference from which a note is made, of steps with and without waits between them."""
UNLIKE_CLOCKS = 0.05
"""Relative difference of two clocks from which a note is made. Chosen: a power limit often causes a few percent."""
BORDER_NS = 1_000_000
"""Time at a step's borders from which a note is made; the profiler itself takes a tenth of it."""
WAITED = 0.03
"""The machine was busy if steps waited for a processor for more than this share of their time. Chosen: it exceeds the
differences between steps on a quiet machine."""
MOST_NOISE = 3.0
"""Largest half width, as a logarithm, that a busy machine may add: a factor of twenty."""
_PART = re.compile(r"rank(\d{1,8})$")
_WINDOW = re.compile(r"(?:kineto(?:-(\d+))?\.json\.gz|graph(?:-(\d+))?\.foretrace)$")


@dataclass(frozen=True, slots=True)
class CapturePart:
    """The files one rank wrote. ``windows`` are the profiler's traces or saved graphs, one for each cycle, in order."""

    path: Path
    rank: int
    """``NONE`` for a directory that holds the files directly."""
    windows: list[Path] = field(default_factory=list)
    execution_trace: Path | None = None
    left_out: list[str] = field(default_factory=list)
    """A sentence for each file that was not read."""


def part_name(rank: int) -> str:
    """Return the directory of a rank's part in the job's directory."""
    return f"rank{rank}"


def window_name(index: int, form: str) -> str:
    """Return the file name of a window's trace, ``form`` "json" or "foretrace"."""
    number = f"-{index}" if index else ""
    return f"graph{number}.foretrace" if form == "foretrace" else f"kineto{number}.json.gz"


def is_part_file(name: str) -> bool:
    """Return whether a file of this name in a part belongs to a capture."""
    return name in SIDE_FILES or name == EXECUTION_TRACE or _WINDOW.match(name) is not None


def find_parts(directory: PathLike) -> list[CapturePart]:
    """Return the parts of a captured job, by rank; empty if the directory is no capture or on a remote file system."""
    root = Path(directory)
    if "://" in os.fspath(directory) or not root.is_dir():
        return []
    if os.path.lexists(root / CONTEXT):
        own = _part(root, NONE)
        return [own] if own.windows or "complete" in read_context(root) else []
    found = []
    for path in root.iterdir():
        match = _PART.match(path.name)
        if match and os.path.lexists(path / CONTEXT):
            part = _part(path, int(match.group(1)))
            if part.windows or (path / CONTEXT).is_file():
                found.append(part)
    return sorted(found, key=lambda part: part.rank)


def _part(path: Path, rank: int) -> CapturePart:
    windows: dict[int, Path] = {}
    left_out = []
    # A regular file of the capture takes precedence over a link of the same window.
    for name in sorted(os.listdir(path), key=lambda name: (os.path.islink(path / name), name)):
        match = _WINDOW.match(name)
        if match is None:
            continue
        window = int(match.group(1) or match.group(2) or 0)
        why = why_not_read(path / name)
        if not why and window in windows and os.path.islink(path / name):
            why = f"is a link beside {windows[window].name}"
        if why:
            left_out.append(f"{path.name}/{name} {why}; it was not read.")
        else:
            windows.setdefault(window, path / name)
    trace = path / EXECUTION_TRACE
    if why := why_not_read(path / CONTEXT) or _damaged_link(path / CONTEXT):
        left_out.append(f"{path.name}/{CONTEXT} {why}; it was not read, and what only it says is not known: steps "
                        "without the profiler, the hardware, versions.")
    return CapturePart(path, rank, [windows[i] for i in sorted(windows)], trace if os.path.lexists(trace) else None,
                       left_out)


def _damaged_link(path: Path) -> str:
    """Return the end of a sentence about a link that leads to no JSON object; empty for any other path."""
    try:
        sound = not path.is_symlink() or isinstance(from_json(read_input(path)), dict)
    except (OSError, DecodeError):
        sound = False
    return "" if sound else "is a link to what is none of a capture's files"


def read_context(directory: PathLike) -> dict[str, Any]:
    """Read a part's ``context.json``; return {} if it is missing or does not belong to a capture. Raises ``TraceError``
    if it is damaged."""
    path = Path(directory) / CONTEXT
    if why_not_read(path) or _damaged_link(path):
        return {}
    try:
        value = from_json(read_input(path))
    except FileNotFoundError:
        return {}
    except (OSError, DecodeError) as error:
        raise TraceError(f"{path} cannot be read ({error}); copy or record it again.") from error
    if not isinstance(value, dict):
        raise TraceError(f"{path} is not a capture's context (a JSON object); record it again.")
    return value


def others_files(part: PathLike) -> list[str]:
    """Return the names of files that a new capture would overwrite although no capture wrote them: links, and files
    next to a context that does not belong to a capture."""
    path = Path(part)
    found = [name for name in sorted(os.listdir(path)) if is_part_file(name)] if path.is_dir() else []
    try:
        ours = CONTEXT not in found or "complete" in read_context(path)
    except TraceError:
        ours = len(found) > 1  # a damaged context; alone it may be of any program
    return [name for name in found if not ours or not os.path.isfile(path / name) or os.path.islink(path / name)]


def what_it_holds(part: PathLike) -> str:
    """Return in words what a new capture in a rank's part would replace; empty if nothing was measured there."""
    path = Path(part)
    if not path.is_dir():
        return ""
    windows = len(_part(path, NONE).windows)
    try:
        context = read_context(path)
    except TraceError:
        return f"a capture with a damaged {CONTEXT}"
    if context.get("complete") is True:
        return "a complete capture"
    times = _timed_steps(context)
    if not windows and not times:
        return ""
    # Only what happened, without the advice.
    ended = re.split(r" \(|: |\.$", str(context.get("ended") or ""), maxsplit=1)[0]
    why = f": {ended}" if ended else ""
    return f"a partial capture ({recorded_text(times, windows)}{why})"


def recorded_text(timed: int, windows: int) -> str:
    """Return the counts as part of a sentence: "3 timed steps and 1 trace"."""
    traces = "no trace" if not windows else "1 trace" if windows == 1 else f"{windows} traces"
    return f"{timed} timed step{'' if timed == 1 else 's'} and {traces}"


def _step_times(context: dict[str, Any], directory: PathLike) -> list[int]:
    """Return the times of the steps without the profiler, ns. Raises ``TraceError`` for impossible times."""
    times = context.get("unprofiled_step_ns") or []
    if not isinstance(times, list) or not all(type(t) is int and LEAST_STEP_NS <= t < _MOST_STEP_NS for t in times):
        raise TraceError(f"The capture {os.fspath(directory)} is damaged: its {CONTEXT} holds times of steps that "
                         "cannot be. Capture again.")
    return list(times)


def step_times(directory: PathLike) -> list[int]:
    """Return the times of one rank's unprofiled steps, ns, corrected as for every reader of the capture.

    Raises:
        TraceError: its context is damaged.
    """
    context = read_context(directory)
    return _without_waits(_step_times(context, directory), context)


def _without_waits(times: list[int], context: dict[str, Any]) -> list[int]:
    """Return the step times, ns, less each step's wait for a processor if the machine was busy.

    Only where the host computes: with a device, a waiting host may still be ahead of it.
    """
    waited = _waited_ns(context)
    if not waited or len(waited) != len(times) or _mapping(context, "hardware").get("device") != "CPU":
        return times
    return [max(ns - wait, LEAST_STEP_NS) for ns, wait in zip(times, waited, strict=True)]


def _waited_ns(context: dict[str, Any]) -> list[int]:
    """Return the time that each timed step waited for a processor, ns; empty if the machine was not busy."""
    waited, ns = _waits(context, "timed")
    return waited if sum(waited) > WAITED * ns else []


def _waits(context: dict[str, Any], phase: str) -> tuple[list[int], int]:
    """Return each measured step's wait for a processor in a phase, ns, and the time of all steps. Return [] and 0 if
    the waits were not counted."""
    found = _mapping(_mapping(_mapping(context, "machine"), "waiting"), phase)
    waited, ns = found.get("waited_ns"), found.get("ns")
    if _whole(context, "world_size") > 1 and context.get("fake_world") is not True:
        return [], 0  # ranks of one machine wait for each other, which is the job's own time
    if not isinstance(waited, list) or not all(type(one) is int and one >= 0 for one in waited) or not (
            type(ns) is int and ns > 0):
        return [], 0
    return list(waited), ns


def _of_machine(context: dict[str, Any]) -> str:
    """Return a sentence about the effect of a busy machine on a capture; empty if there was none."""
    said = _mapping(_mapping(context, "machine"), "verdict").get("sentence")
    left = ""
    if (waited := _waited_ns(context)) and _mapping(context, "hardware").get("device") == "CPU":
        left = f" The timed steps stand here without the {sum(waited) / 1e6:,.1f} ms that they waited in all."
    return f"{said}{left}" if isinstance(said, str) and said else ""


def _timed_steps(context: dict[str, Any]) -> int:
    times = context.get("unprofiled_step_ns")
    return len(times) if isinstance(times, list) else 0


def apply_context(graph: ExecutionGraph, directory: PathLike) -> bool:
    """Copy the facts of ``context.json`` into ``graph.meta``; return whether there is such a file.

    Step times and flags are taken from the file. Device, rank and groups are kept where the trace has them.

    Raises:
        TraceError: the file is damaged.
    """
    context = read_context(directory)
    if not context:
        return False
    meta = graph.meta
    hardware, software = _mapping(context, "hardware"), _mapping(context, "software")
    meta.unprofiled_step_ns = _without_waits(_step_times(context, directory), context)
    spread = _mapping(_mapping(context, "machine"), "verdict").get("spread")
    meta.noise = min(max(float(spread), 0.0), MOST_NOISE) if isinstance(spread, int | float) else 0.0
    waited, ns = _waits(context, "profiled")
    meta.waited_share = min(sum(waited) / ns, 1.0) if waited else 0.0
    meta.profiler_flags.update({str(name): bool(value) for name, value in _mapping(context, "profiler").items()})
    meta.versions.update({str(name): str(value) for name, value in software.items()})
    meta.host_cores, meta.host_threads = _whole(hardware, "cores_usable"), _whole(context, "torch_threads")
    units = hardware.get("cpu_units")
    meta.host_units = [str(unit) for unit in units] if isinstance(units, list) else []
    meta.torch_version = meta.torch_version or str(software.get("torch", ""))
    if hardware.get("device") not in (None, "CPU"):
        meta.device = meta.device or str(hardware["device"])
        meta.compute_capability = meta.compute_capability or str(hardware.get("compute_capability", ""))
        meta.device_count = meta.device_count or _whole(hardware, "device_count", 0)
        if meta.device_memory_bytes == NONE:
            meta.device_memory_bytes = _whole(hardware, "total_memory")
        if meta.sm_count == NONE:
            meta.sm_count = _whole(hardware, "multi_processor_count")
        meta.clock_mhz = _clock_mhz(context)
    elif hardware.get("device") == "CPU" and not len(graph.kernels):  # the profiler lists unused devices too
        meta.device, meta.compute_capability, meta.device_count = "", "", 0
        meta.device_memory_bytes = meta.sm_count = NONE
    if meta.rank == NONE:
        meta.rank = _whole(context, "rank")
    if meta.world_size == NONE:
        meta.world_size = _whole(context, "world_size")
    meta.leave_out_unbelievable()
    meta.backend = meta.backend or str(context.get("backend", ""))
    workload = _mapping(context, "workload")
    if isinstance(workload.get("name"), str) and isinstance(workload.get("settings"), dict):
        meta.workload = {"name": workload["name"], "settings": workload["settings"]}
    with suppress(msgspec.ValidationError):
        meta.program = msgspec.convert(context.get("program"), ProgramNote | None)
    groups = context.get("process_groups")
    if isinstance(groups, list) and not meta.process_groups:
        meta.process_groups = [group for group in groups if isinstance(group, dict)]
    return True


def _mapping(context: dict[str, Any], name: str) -> dict[str, Any]:
    value = context.get(name)
    return value if isinstance(value, dict) else {}


def _whole(values: dict[str, Any], name: str, default: int = NONE) -> int:
    value = values.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) else default


class CapturedRanks(NamedTuple):
    """The ranks of a capture, before the check that they belong to one job.

    Attributes:
        graphs: One for each rank that could be read.
        notes: Sentences for reports of the job.
        classes: The ranks that do the same work, if the capture is of a fake world with a known plan.
    """

    graphs: list[ExecutionGraph]
    notes: list[str]
    classes: list[tuple[Span, ...]]


def read_capture(directory: PathLike, *, window: int = 0, progress: Callable[[int, int], None] | None = None,
                 step_region: str | None = None) -> CapturedRanks:
    """Read the ranks of a captured job: every one's graph with its execution trace, context and collectives.

    Args:
        directory: What ``tracer.capture`` wrote, or one rank's part of it.
        window: Which cycle's window, from 0.
        progress: Called with (bytes done, bytes in all) of the traces.
        step_region: The steps are the regions of this name; by default those that the capture marked.

    Raises:
        TraceError: The directory is no capture, no rank recorded that window, or a file is damaged.
        StepRegionError: A rank has no region named ``step_region``.
    """
    parts = find_parts(directory)
    if not parts:
        raise TraceError(f"{os.fspath(directory)} is not a capture: it holds no {part_name(0)}/{CONTEXT}.")
    recorded = [part for part in parts if 0 <= window < len(part.windows)]
    if not recorded:
        raise TraceError(_nothing_recorded(os.fspath(directory), parts, window))
    notes = [f"{part.path.name}: {_state(part)}" for part in parts if part not in recorded]
    notes += [note for part in parts for note in part.left_out]
    total, done = sum(part.windows[window].stat().st_size for part in recorded), 0
    graphs = []
    for part in recorded:
        try:
            graphs.append(_read_part(part, window, notes, shifted(progress, done, total), step_region))
        except StepRegionError:
            raise  # without that rank the result would be a different job
        except ForetraceError as error:
            if len(recorded) == 1:
                raise
            notes.append(f"Skipped: {error}")
        done += part.windows[window].stat().st_size
    if not graphs:
        raise TraceError(f"No rank of {os.fspath(directory)} could be read. {' '.join(notes)}")
    if unlike := unlike_clocks(recorded):
        notes.append(unlike)
    most = max(len(part.windows) for part in parts)
    if most > 1:
        notes.append(f"The capture has {most} windows; this is number {window}. --window N (window=N) reads "
                     f"another, from 0 to {most - 1}.")
    return CapturedRanks(graphs, notes, _same_work(recorded))


def _same_work(parts: list[CapturePart]) -> list[tuple[Span, ...]]:
    """Return the classes of ranks that do the same work, if the parts are of a fake world and agree; else empty."""
    told = []
    for part in parts:
        context = read_context(part.path)
        value = _mapping(context, "parallel").get("classes") if context.get("fake_world") is True else None
        told.append(checked_classes(value, _whole(context, "world_size")))
    return told[0] if told and told[0] is not None and all(each == told[0] for each in told) else []


def read_window(part: PathLike, window: int = 0) -> ExecutionGraph:
    """Return one window of a rank's part, with execution trace, context and collectives. Raises ``TraceError``."""
    return _read_part(_part(Path(part), NONE), window, [], None)


def shifted(progress: Callable[[int, int], None] | None, done: int, total: int) -> Callable[[int, int], None] | None:
    """Return a callback that reports the progress of one of several files, after ``done`` bytes of earlier ones."""
    return None if progress is None else lambda now, _: progress(done + now, total)


def _read_part(part: CapturePart, window: int, notes: list[str],
               progress: Callable[[int, int], None] | None,
               step_region: str | None = None) -> ExecutionGraph:
    path, context = part.windows[window], read_context(part.path)
    if path.suffix == ".foretrace":
        graph = load_graph(path, step_region=step_region)
    else:
        # Its package imports this module.
        from tracer.capture.merge import merge_collectives, merge_lookups, merge_python

        graph = kineto.read_kineto(path, progress=progress, step_region=step_region)
        if part.execution_trace is not None:
            try:
                join_execution_trace(graph, part.execution_trace)
            except TraceError as error:
                notes.append(f"An execution trace was not joined: {error}")
        notes += merge_collectives(graph, part.path / COLLECTIVES, context.get("process_groups"))
        notes += merge_lookups(graph, part.path / LOOKUPS)
        notes += merge_python(graph, part.path / PYTHON_CALLS)
    apply_context(graph, part.path)
    if graph.meta.step_region and graph.meta.unprofiled_step_ns:
        # A named region may be half a step of the capture, or several.
        graph.meta.unprofiled_step_ns = []
        notes.append(f"{part.path.name}: the steps measured without the profiler are not the regions "
                     f"{graph.meta.step_region!r}; their times are left out.")
    _note_law(graph)
    if context.get("fake_world") is True:
        note_overlap(graph)
    for note in (_of_machine(context), _slowed(context), _ran_ahead(context, graph.meta.unprofiled_step_ns),
                 "" if step_region else _at_borders(context, graph.steps.duration_ns, window)):
        if note:
            notes.append(f"{part.path.name}: {note}")
    optimizers = _mapping(context, "optimizers")
    if isinstance(optimizers.get("note"), str) and optimizers["note"]:
        notes.append(f"{part.path.name}: {optimizers['note']}")
    if context.get("complete") is False:
        notes.append(f"{part.path.name}: {_state(part)}")
    return graph


def _sampled(context: dict[str, Any], name: str) -> list[Any]:
    """Return one column of the samples of a rank's GPU; empty if the GPU was not sampled."""
    samples = _mapping(context, "gpu_samples")
    columns, rows = samples.get("columns"), samples.get("rows")
    if not isinstance(columns, list) or not isinstance(rows, list) or name not in columns:
        return []
    return [row[columns.index(name)] for row in rows if isinstance(row, list) and len(row) == len(columns)]


def _clock_mhz(context: dict[str, Any]) -> int:
    """Return the median clock of a rank's GPU, MHz, without the first sample; ``NONE`` if it was not sampled."""
    clocks = [mhz for mhz in _sampled(context, "sm_mhz")[1:] if type(mhz) is int and 0 < mhz < 1 << 31]
    return int(np.median(clocks)) if clocks else NONE


def are_unlike_clocks(one_mhz: float, other_mhz: float) -> bool:
    """Return whether two clocks differ by more than ``UNLIKE_CLOCKS`` of the higher one."""
    return abs(one_mhz - other_mhz) > UNLIKE_CLOCKS * max(one_mhz, other_mhz)


def unlike_clocks(parts: list[CapturePart]) -> str:
    """Return a sentence on the ranks whose GPU clocks differ most; empty if they are alike."""
    medians = {part.rank: clock for part in parts if (clock := _clock_mhz(read_context(part.path))) != NONE}
    if not medians or not are_unlike_clocks(min(medians.values()), max(medians.values())):
        return ""
    slow, quick = min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)
    return (f"The ranks' GPUs ran at different clocks: rank {slow}'s at {medians[slow]:,.0f} MHz, rank {quick}'s at "
            f"{medians[quick]:,.0f} MHz.")


def _slowed(context: dict[str, Any]) -> str:
    """Return a sentence on the samples in which the device's clock was held back, and why; empty if there are none."""
    reasons = _sampled(context, "slowed_by")
    held = [each for each in reasons if isinstance(each, list | tuple) and each]
    if not held:
        return ""
    what = sorted({str(reason) for each in held for reason in each})
    return (f"the device's clock was held back by {' and '.join(what)} in {len(held)} of {len(reasons)} samples "
            "around the measured steps: its kernels took longer than they would at full clock.")


def _ran_ahead(context: dict[str, Any], unprofiled_ns: list[int]) -> str:
    """Return a sentence on how steps without waits between them differ from the measured ones; empty if they do not."""
    window = _mapping(_mapping(context, "timing"), "free_running")
    steps, ns = _whole(window, "steps"), _whole(window, "ns")
    if steps <= 0 or ns <= 0 or not unprofiled_ns or not _mapping(context, "timing").get("waited_for"):
        return ""
    mean, each = ns / steps, float(np.median(unprofiled_ns))
    if abs(mean / each - 1.0) < RUN_AHEAD:
        return ""
    return (f"the measured steps, {each / 1e6:.3f} ms, end with idle devices, as the recorded ones do; {steps} steps "
            f"without a wait between them took {mean / 1e6:.3f} ms each.")


def _at_borders(context: dict[str, Any], recorded_ns: np.ndarray, window: int) -> str:
    """Return a sentence if recorded steps are longer in the trace than by the clock around them; else empty."""
    given = context.get("profiled_step_ns")
    clocked = given[window * len(recorded_ns):][:len(recorded_ns)] if isinstance(given, list) else []
    if not len(recorded_ns) or len(clocked) != len(recorded_ns) or not all(
            type(ns) is int and abs(ns) < _MOST_STEP_NS for ns in clocked):
        return ""
    longer = recorded_ns - np.array(clocked, np.int64)
    if longer.min() < max(BORDER_NS, 0.05 * float(np.median(clocked))):
        return ""
    return (f"every recorded step lasts at least {longer.min() / 1e6:.3f} ms longer in the trace than by the clock "
            "around it: something ran at its borders, and is counted as the program's.")


def _state(part: CapturePart) -> str:
    context = read_context(part.path)
    why = str(context.get("ended") or "it ended early")
    return f"the capture is not complete: {why}"


def _nothing_recorded(directory: str, parts: list[CapturePart], window: int) -> str:
    most = max(len(part.windows) for part in parts)
    if most == 1:
        return (f"{directory} has one window, so there is no window {window}; leave --window out, or record several "
                "with cycles.")
    if most:
        return f"{directory} has {most} windows, so there is no window {window}; choose one from 0 to {most - 1}."
    times = max(_timed_steps(read_context(part.path)) for part in parts)
    left_out = [note for part in parts for note in part.left_out]
    why = " ".join(left_out) if left_out else _state(parts[0])
    return f"{directory} holds {recorded_text(times, 0)}: {why}"


def _note_law(graph: ExecutionGraph) -> None:
    """Note the look-ups of a suite workload by the distribution that it draws from, if none were counted. In place."""
    noted = graph.meta.workload
    if not noted or tables_of(graph):
        return
    try:
        tables = workloads.configure(noted["name"], **noted["settings"]).embedding_tables()
    except (ForetraceError, KeyError, TypeError):  # of another version, or an edited file
        return
    if tables:
        note_tables(graph, tables)
