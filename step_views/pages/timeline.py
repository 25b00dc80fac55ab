"""The timeline section: measured and simulated threads and streams of every rank, with the critical path highlighted.

It shows the step of median length; measured and simulated times both count from its begin.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graph_predictor.simulation.engine import Path, path_back
from graph_predictor.simulation.program import Bound, ItemKind
from step_views.pages.events import KIND_CODE, EventNames, Track, pack
from step_views.pages.parts import PageSection, TrackEvents
from step_views.reports.ranks.report import median_step
from step_views.reports.ranks.stragglers import path_ranks
from step_views.reports.ranks.times import JobTimes, Window
from step_views.reports.timeline import carried, known_times, lanes
from tracer.arrays import Bool, Int64
from tracer.graph import NONE, SHAPE_ONLY, ExecutionGraph, KernelKind, OpKind, Phase

MOST_ROWS_OF_THREAD = 14
"""Deepest nesting of operations that is shown; deeper operations are part of their parent."""
MEASURED = "measured"

_PHASES = np.full(len(Phase), KIND_CODE["operation"], np.int64)
for _phase, _name in ((Phase.FORWARD, "forward"), (Phase.BACKWARD, "backward"), (Phase.OPTIMIZER, "optimizer")):
    _PHASES[_phase] = KIND_CODE[_name]
_KERNELS = np.array([KIND_CODE[{KernelKind.COMPUTE: "kernel", KernelKind.COLLECTIVE: "collective"}.get(
    kind, "memory copy")] for kind in KernelKind], np.int64)
_BOUNDS = np.array([KIND_CODE["kernel" if bound is Bound.COMPUTE else bound.label] for bound in Bound], np.int64)


def timeline_section(times: JobTimes) -> PageSection:
    """Return the timeline of a job's median step; without parts if there is nothing to show."""
    windows = median_step(times.windows)
    if not windows:
        return PageSection("timeline", "Timeline", [])
    shown = _Shown(times, windows)
    tracks = [track for window in sorted(windows, key=lambda w: w.rank) for track in shown.of_rank(window)]
    columns, said = pack(tracks, shown.names, shown.length_ns())
    ranks = f" of {len(windows):,} ranks" if len(windows) > 1 else ""
    measured = any(track.source == MEASURED for track in tracks)
    beside = f"measured, and {shown.simulated} below it" if measured else shown.simulated
    return PageSection("timeline", "Timeline", [TrackEvents(
        "timeline", f"{windows[0].name}{ranks}: threads and streams, {beside}",
        "Time runs to the right from the begin of the step; each row is a host thread or a stream, and what the "
        "critical path consists of is underlined. Drag or use the arrow keys to move, Ctrl and the wheel, two fingers, "
        "or + and − to zoom; a title with ▸ unfolds.", columns, said)])


@dataclass(frozen=True, slots=True)
class _Span:
    """A rank's recorded window: its times, ns in the rank's graph, and the rows of its kernels and calls."""

    start: int
    end: int
    kernels: Int64
    calls: Int64


class _Shown:
    """Makes the tracks of one step of a job."""

    def __init__(self, times: JobTimes, windows: list[Window]) -> None:
        self.times, self.names, self.windows = times, EventNames(), windows
        self.simulated = "predicted" if times.predicted else "replayed"
        self.begin = min(w.start_ns for w in windows)
        # Its tracks are open at first, and the critical path ends with this window.
        longest = self.longest = max(windows, key=lambda w: (w.length_ns, w.end_ns))
        self.path: Path | None = None
        if longest.at is not None and longest.length_ns:
            self.path = path_back(times.program, times.simulated, times.kinds, longest.at, longest.start_ns,
                                  across=True)
        self.thread_of = times.program.item_thread()
        self.on_path = np.zeros(len(times.program.kernel_item), bool)
        self.item_on_path = np.zeros(len(self.thread_of), bool)
        if self.path is not None:
            self.on_path[self.path.kernel[self.path.kernel >= 0]] = True
            self.item_on_path[self.path.item[(self.path.item >= 0) & ~self.path.is_work]] = True
        self.spans = {w.rank: self._span(w) for w in windows if times.graphs[w.rank].meta.era != SHAPE_ONLY}
        clock = times.built.clock_ns
        self.recorded_begin = min((span.start + clock[rank] for rank, span in self.spans.items()), default=0)
        self.last = max(w.end_ns for w in windows) - self.begin

    def length_ns(self) -> int:
        """Length of the shown time, ns."""
        return max(self.last, 1)

    def _span(self, window: Window) -> _Span:
        """Return the recorded span of a window: the steps in which its work was launched."""
        times, graph = self.times, self.times.graphs[window.rank]
        rows = times.graph_row(window.kernels)
        items = self._items(window)
        calls = self._calls(items)
        steps = np.unique(np.concatenate([graph.kernels.step[rows], graph.launches.step[calls]]).astype(np.int64))
        steps = steps[steps >= 0]
        named = [graph.string(code) for code in graph.steps.name.tolist()]
        exact = [row for row, name in enumerate(named) if name == window.name]
        if len(exact) == 1:
            steps = np.array(exact)
        if not len(steps):
            start, end = 0, max(graph.meta.window_ns, 1)
        else:
            start = int(graph.steps.start_ns[steps].min())
            end = int((graph.steps.start_ns[steps] + graph.steps.duration_ns[steps]).max())
        begun = graph.launches.start_ns
        return _Span(start, end, np.unique(rows), np.flatnonzero((begun >= start) & (begun < end)))

    def _items(self, window: Window) -> Int64:
        """Return the items of a rank that end within its window, including the window's begin."""
        times = self.times
        mine = times.program.thread_rank[self.thread_of] == window.rank
        at = times.simulated.item_end
        return np.flatnonzero(mine & (at >= window.start_ns) & (at <= window.end_ns))

    def _calls(self, items: Int64) -> Int64:
        """Return the rows of ``launches`` for those items that are calls."""
        program = self.times.program
        return program.item_row[items[program.item_kind[items] == ItemKind.CALL]].astype(np.int64)

    def of_rank(self, window: Window) -> list[Track]:
        """Return a rank's tracks: its part of the critical path, threads and streams, measured and simulated."""
        times = self.times
        group = f"rank {times.number(window.rank)}" if len(self.windows) > 1 else ""
        tracks = [*self._path_track(window, group)]
        threads: dict[int, list[Track]] = {}
        streams: dict[tuple[int, int], list[Track]] = {}
        if window.rank in self.spans:
            span = self.spans[window.rank]
            shift = times.built.clock_ns[window.rank] - self.recorded_begin
            graph = times.graphs[window.rank]
            self.last = max(self.last, span.end + shift)
            self._host_tracks(threads, graph, group, MEASURED, span, shift, None)
            start = graph.kernels.start_ns[span.kernels] + shift
            end = start + graph.kernels.duration_ns[span.kernels]
            self._stream_tracks(streams, graph, group, MEASURED, span.kernels, start, end,
                                np.zeros(len(span.kernels), bool))
        self._simulated(window, group, threads, streams)
        for tracks_of in (*threads.values(), *streams.values()):
            tracks += tracks_of
        for track in tracks:
            track.open = window is self.longest
        return tracks

    def _simulated(self, window: Window, group: str, threads: dict[int, list[Track]],
                   streams: dict[tuple[int, int], list[Track]]) -> None:
        times, graph = self.times, self.times.graphs[window.rank]
        items = self._items(window)
        span = self.spans.get(window.rank)
        if len(items):
            self._host_tracks(threads, graph, group, self.simulated, span, 0, items)
        kernels = window.kernels
        start, end = times.simulated.kernel_start[kernels], times.simulated.kernel_end[kernels]
        if len(kernels):
            self.last = max(self.last, int(end.max()) - self.begin)
        self._stream_tracks(streams, graph, group, self.simulated, times.graph_row(kernels), start - self.begin,
                            end - self.begin, self.on_path[kernels])

    def _path_track(self, window: Window, group: str) -> list[Track]:
        path, times = self.path, self.times
        if path is None or not len(path.start_ns):
            return []
        mine = np.flatnonzero(path_ranks(times.program, path, NONE) == window.rank)
        graph = times.graphs[window.rank]
        codes = np.full(len(mine), NONE, np.int64)
        kernel, item = path.kernel[mine], path.item[mine]
        codes[kernel >= 0] = graph.kernels.name[times.graph_row(kernel[kernel >= 0])]
        calls = (kernel < 0) & (item >= 0) & ~path.is_work[mine]
        calls[calls] = times.program.item_kind[item[calls]] == ItemKind.CALL
        codes[calls] = graph.launches.name[times.program.item_row[item[calls]]]
        names = self.names.of(codes, graph.strings)
        host = self.names.code("host work")
        names = np.where(codes < 0, host, names)
        return [Track("critical path", group, "", np.zeros(len(mine), np.int64), path.start_ns[mine] - self.begin,
                      path.end_ns[mine] - self.begin, names, _BOUNDS[path.bound[mine]], np.zeros(len(mine), bool))]

    def _host_tracks(self, threads: dict[int, list[Track]], graph: ExecutionGraph, group: str, source: str,
                     span: _Span | None, shift: int, items: Int64 | None) -> None:
        """Add a track for each thread, with nested operations and the calls in them."""
        times, ops = self.times, graph.ops
        rows: Int64 = np.zeros(0, np.int64)
        if span is not None:
            wanted = (ops.kind == OpKind.OPERATION) | ~np.isin(ops.name, graph.steps.name)
            rows = np.flatnonzero(wanted & (ops.start_ns >= span.start) & (ops.start_ns < span.end))
        depth = _depth(graph)
        if items is None:
            assert span is not None
            calls = span.calls
            call_start = graph.launches.start_ns[calls] + shift
            call_end = call_start + graph.launches.duration_ns[calls]
            of_call, call_lit = graph.launches.thread[calls].astype(np.int64), np.zeros(len(calls), bool)
            groups: list[tuple[int, Int64 | None]] = [
                (thread, None) for thread in np.unique(np.concatenate([ops.thread[rows], of_call])).tolist()]
        else:
            numbers = np.array(times.built.thread_number or [NONE] * len(times.program.thread_rank), np.int64)
            thread_of = numbers[self._built_thread(items)]
            is_call = times.program.item_kind[items] == ItemKind.CALL
            calls = times.program.item_row[items[is_call]].astype(np.int64)
            call_start = times.simulated.item_start[items[is_call]] - self.begin
            call_end = times.simulated.item_end[items[is_call]] - self.begin
            of_call, call_lit = thread_of[is_call], self.item_on_path[items[is_call]]
            groups = [(thread, items[thread_of == thread]) for thread in np.unique(thread_of).tolist()]
        for thread, own in groups:
            mine = rows[ops.thread[rows] == thread]
            if own is not None and times.gone is not None:
                rank = int(times.program.thread_rank[self.thread_of[own[0]]])
                mine = mine[~times.gone.operations[rank][mine]]
            start, end = ops.start_ns[mine], ops.start_ns[mine] + ops.duration_ns[mine]
            if own is None:
                start, end = start + shift, end + shift
            else:
                start, end, keep = self._moved(own, start, end)
                mine, start, end = mine[keep], start[keep], end[keep]
            these = np.flatnonzero(of_call == thread)
            level = np.concatenate([depth[mine], np.where(graph.launches.op[calls[these]] >= 0,
                                                          depth[graph.launches.op[calls[these]]] + 1, 0)
                                    + (graph.launches.parent[calls[these]] >= 0)])
            shown = level < MOST_ROWS_OF_THREAD
            known = graph.threads[thread] if 0 <= thread < len(graph.threads) else None
            title = (known.name or f"thread {known.tid}") if known else "thread"
            track = Track(
                f"{title}, {source}", group, source, level[shown], np.concatenate([start, call_start[these]])[shown],
                np.concatenate([end, call_end[these]])[shown],
                np.concatenate([self.names.of(ops.name[mine], graph.strings),
                                self.names.of(graph.launches.name[calls[these]], graph.strings)])[shown],
                np.concatenate([_PHASES[np.maximum(ops.phase[mine], 0)],
                                np.full(len(these), KIND_CODE["call"], np.int64)])[shown],
                np.concatenate([np.zeros(len(mine), bool), call_lit[these]])[shown])
            threads.setdefault(thread, []).append(_without_overlap(track))

    def _built_thread(self, items: Int64) -> Int64:
        """Return the threads of the built program on which these items of the simulated program run."""
        built = self.times.built.program
        return np.searchsorted(built.thread_ptr, self.times.item[items], side="right") - 1

    def _moved(self, items: Int64, start: Int64, end: Int64) -> tuple[Int64, Int64, Bool]:
        """Return operations' begins and ends shifted to simulated host time, and which operations are in the window."""
        times = self.times
        rank = int(times.program.thread_rank[self.thread_of[items[0]]])
        clock = times.built.clock_ns[rank]
        known, after = known_times(times.built.recorded_program, times.simulated, times.slices, times.host_ns, items,
                                   times.item[items], clock)
        before = known - clock
        inside = (start >= before[0]) & (end <= before[-1])
        return carried(start, before, after) - self.begin, carried(end, before, after) - self.begin, inside

    def _stream_tracks(self, streams: dict[tuple[int, int], list[Track]], graph: ExecutionGraph, group: str,
                       source: str, rows: Int64, start: Int64, end: Int64, lit: Bool) -> None:
        """Add a track for each stream; overlapping kernels of a stream get rows of their own."""
        kernels = graph.kernels
        several = len(np.unique(kernels.device[rows])) > 1
        pairs = np.unique(np.stack([kernels.device[rows].astype(np.int64), kernels.stream[rows]]), axis=1)
        for device, stream in pairs.T.tolist():
            mine = np.flatnonzero((kernels.device[rows] == device) & (kernels.stream[rows] == stream))
            title = f"GPU {device} stream {stream}" if several else f"stream {stream}"
            streams.setdefault((device, stream), []).append(Track(
                f"{title}, {source}", group, source, np.array(lanes(start[mine], end[mine]), np.int64), start[mine],
                end[mine], self.names.of(kernels.name[rows[mine]], graph.strings), _KERNELS[kernels.kind[rows[mine]]],
                lit[mine]))


def _depth(graph: ExecutionGraph) -> Int64:
    """Return how many operations enclose each operation, without steps' own ranges."""
    ops = graph.ops
    counts = ((ops.kind == OpKind.OPERATION) | ~np.isin(ops.name, graph.steps.name)).astype(np.int64)
    depth = np.zeros(len(ops) + 1, np.int64)
    above = ops.parent.astype(np.int64)
    while (above >= 0).any():
        inside = above >= 0
        depth[:-1][inside] += counts[above[inside]]
        above = np.where(inside, ops.parent[np.maximum(above, 0)], NONE)
    return depth


def _without_overlap(track: Track) -> Track:
    """Return a track in which events end at the latest where the next event of their row begins; none is negative."""
    order = np.lexsort((track.start, track.row))
    row, start, end = track.row[order], np.maximum(track.start[order], 0), np.maximum(track.end[order], 0)
    same = row[1:] == row[:-1]
    end[:-1] = np.where(same, np.minimum(end[:-1], np.maximum(start[1:], start[:-1])), end[:-1])
    return Track(track.title, track.group, track.source, row, start, np.maximum(end, start), track.name[order],
                 track.kind[order], track.lit[order])
