"""``Job``: the recorded ranks of one run; read from their files, saved as one and loaded again.

Takes a file, several files, a directory, a glob or fsspec URLs; profiler traces, saved graphs and execution traces may
be mixed. Files of another job are refused; ``Job.notes`` reports what is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import pairwise
from typing import Generic, TypeVar, get_type_hints

from tracer import kineto
from tracer.capture_layout import find_parts, read_capture, read_context, shifted, unlike_clocks
from tracer.cluster.forked import ForkedWorkers, idle_cores
from tracer.cluster.workers import Failed, LostWorkerError, TaskWorkers, ThisProcess
from tracer.errors import CycleError, GraphFileError, JobError, StepRegionError, TraceError, listed
from tracer.files import FileKind, FoundFile, find_files
from tracer.graph import NONE, SHAPE_ONLY, ExecutionGraph, HasMeta
from tracer.guard import MOST_RANKS
from tracer.input_file import DecodeError, PathLike, convert
from tracer.join import join_execution_trace
from tracer.lazy import pandas
from tracer.ranks import FAKE, RankClass, Span, all_alike, missing_of, rank_in_name, renumbered
from tracer.shown import Chart, Shown, time_chart
from tracer.step_work import check_cycle, group_steps
from tracer.store.container import corrupt, write_file
from tracer.store.graphs import load_graphs, pack_graphs

LEAST_BYTES, UNPACKED = 16 << 20, 10
"""Bytes of text from which copies of this process read the traces, if cores are idle. That much takes 0.1 s to read;
starting copies takes a tenth of that. Compressed traces hold at least ten times their bytes."""

ASSUMED = "Assumed"
"""First word of the note on a job whose ranks are folded by an assumed plan."""

APART_NS = 10_000_000_000
APART_WINDOWS = 10
"""Two ranks' windows belong to different jobs if they lie more than 10 s *and* ten window lengths apart. Ranks of
one job start their windows together: up to 7.5 ms apart in the eight-rank DLRM recording."""

EPOCH_NS = 10**17
"""Smaller absolute times (before 1973) do not come from the epoch clock, so that they cannot date a window."""


@dataclass(repr=False)
class Job(Shown):
    """The recorded ranks of one run.

    Attributes:
        graphs: One per rank, sorted by rank; in a folded job one per class. ``graph.meta.base_time_ns`` puts each on
            the job's common clock.
        world_size: Ranks of the job, recorded here or not.
        notes: One sentence for each thing that was left out or assumed.
        missing_ranks: Ranks of the job that no graph represents.
        classes: The classes of ranks that do the same work, each with the one graph that represents it; empty if the
            job is not folded (see ``tracer.ranks``).
    """

    graphs: list[ExecutionGraph]
    world_size: int = NONE
    notes: list[str] = field(default_factory=list)
    missing_ranks: list[int] = field(default_factory=list)
    classes: list[RankClass] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.graphs)

    def headline(self) -> str:
        """Return one line that says what was recorded."""
        ranks = f"{len(self.graphs):,} of {max(self.world_size, len(self.graphs)):,} ranks"
        return f"{ranks}; {self.graphs[0].headline()}" if self.graphs else ranks

    def tables(self) -> Mapping[str, Callable[[], pandas.DataFrame]]:
        """Return a maker of each table's DataFrame: the rows of all ranks, each with its rank."""
        return {name: partial(self._together, name) for name in ExecutionGraph.TABLES}

    def chart(self) -> Chart:
        """Return a chart of the kernels of all ranks that take most time; of hosts alone, of the operations."""
        device = any(len(graph.kernels) for graph in self.graphs)
        what = "kernels" if device else "operations, with those in them"
        return time_chart([(graph, graph.kernels if device else graph.ops) for graph in self.graphs], self.headline(),
                          what)

    def _together(self, name: str) -> pandas.DataFrame:
        frames = [graph.to_pandas(name).assign(rank=graph.meta.rank) for graph in self.graphs]
        return pandas.concat(frames, ignore_index=True) if frames else pandas.DataFrame()

    @property
    def known_ranks(self) -> int:
        """Return the number of ranks that a graph represents."""
        return sum(len(each) for each in self.classes if each.graph != NONE) if self.classes else len(self.graphs)

    def rank(self, number: int) -> ExecutionGraph:
        """Return a rank's graph; in a folded job that of its class, renumbered. Raises ``JobError`` without a graph."""
        for graph in self.graphs:
            if graph.meta.rank == number:
                return graph
        for each in self.classes:
            if number in each and each.graph != NONE:
                return renumbered(self.graphs[each.graph], number)
        if self.classes:
            have = "; ".join(str(each) for each in self.classes if each.graph != NONE)
            raise JobError(f"Rank {number} is not in this job (it has {have}); choose one of those or trace it too.")
        have = ", ".join(str(graph.meta.rank) for graph in self.graphs)
        raise JobError(f"Rank {number} is not in this job (it has {have}); choose one of those or add its trace.")


AnyJob = Job | ExecutionGraph | Sequence[ExecutionGraph]


def graphs_of(job: AnyJob) -> list[ExecutionGraph]:
    """Return the list of graphs in a ``Job``, a graph or a list of graphs. Raises ``JobError`` for anything else."""
    found = [job] if isinstance(job, ExecutionGraph) else job.graphs if isinstance(job, Job) else job
    if not isinstance(found, list | tuple) or not all(isinstance(graph, ExecutionGraph) for graph in found):
        raise JobError(f"A job is expected, and {type(job).__name__} was given: read it first, with "
                       "foretrace.read(path).")
    return list(found)


def read_job(paths: PathLike | Sequence[PathLike], *, window: int = 0,
             progress: Callable[[int, int], None] | None = None, workers: TaskWorkers | None = None,
             step_region: str | None = None, cycle: int | None = None) -> Job:
    """Read all ranks of one run.

    Args:
        paths: A directory ``tracer.capture`` wrote; or a trace or saved graph, several, a directory of them (not
            searched deeper), a glob, or fsspec URLs of these. Execution traces found or given are joined to the
            profiler trace of their rank.
        window: Which cycle's window of a capture, from 0; other traces have only one.
        progress: Called with (bytes done, bytes in all) of the stored files.
        workers: Read the profiler's traces, one each at a time; by default copies of this process on all cores, if the
            traces are worth it.
        step_region: The steps are the regions of this name, which the program marked with ``record_function``; each
            runs to the next one's start. By default the best evidence decides (see ``tracer.kineto.steps``).
        cycle: How many recorded steps make one step of the job, where the loop alternates (a rollout at every fourth
            update). By default the number after which the work repeats, if it was recorded twice; 1 for no grouping.

    Returns:
        The job; missing ranks and skipped files are named in its notes.

    Raises:
        TraceError: A file that was asked for cannot be read, or nothing readable was found.
        JobError: The files are not ranks of one run (a rank twice, different world sizes, windows far apart).
        StepRegionError: A rank has no region named ``step_region``, or was saved with other steps.
        CycleError: A rank has fewer steps than ``cycle``, or was saved with other cycles.
    """
    check_cycle(cycle)
    job = _read_job(paths, window, progress, workers, step_region)
    job.notes += group_steps(job.graphs, cycle)
    return job


def _read_job(paths: PathLike | Sequence[PathLike], window: int, progress: Callable[[int, int], None] | None,
              workers: TaskWorkers | None, step_region: str | None) -> Job:
    """Read all ranks, with their steps as they were recorded."""
    if step_region is not None and not step_region.strip():
        raise StepRegionError("The name of the steps' region is empty (an unset variable of the shell is); give the "
                              "name that record_function has in the program, or leave --step-region (step_region=) "
                              "out.")
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    if not given:
        raise TraceError("No trace was named; give a file, a directory or a glob.")
    if not all(map(os.fspath, given)):
        raise TraceError("The name of a trace is empty (an unset variable of the shell is); give a file, a directory "
                         "or a glob.")
    if len(given) == 1 and find_parts(given[0]):
        return assemble_captured(*read_capture(given[0], window=window, progress=progress,
                                                step_region=step_region))
    captures = [os.fspath(path) for path in given if len(given) > 1 and find_parts(path)]
    if captures:
        others = listed(os.fspath(path) for path in given if os.fspath(path) != captures[0])
        raise TraceError(f"{captures[0]} is the directory of a capture, which is a whole job: it cannot be read "
                         f"together with {others}. Name one capture; others of the same program go to foretrace "
                         f"predict with --also, such as --also {captures[-1]}:batch=32, and foretrace diff compares "
                         "two.")
    if window != 0:
        raise TraceError(f"There is no window {window} in {listed(os.fspath(path) for path in given)}: only the "
                         "directory of a capture has several; name that directory, or leave --window (window=) out.")
    notes: list[str] = []
    files = find_files([os.fspath(path) for path in given], notes)
    saved = [file for file in files if file.kind is FileKind.GRAPH]
    if saved and len(files) == 1:
        return load_job(saved[0].path, step_region=step_region)
    graphs = _read_members([file for file in files if file.kind is not FileKind.EXECUTION_TRACE], notes, progress,
                           workers, step_region)
    if not graphs:
        raise TraceError(f"No profiler trace could be read from {listed(os.fspath(path) for path in given)}"
                         f"{_why_none(files, notes)} Give the .json or .json.gz files of the profiler.")
    _number_ranks(graphs, notes)
    graphs.sort(key=lambda graph: graph.meta.rank)
    _check_one_job(graphs)
    _join_execution_traces(graphs, [file for file in files if file.kind is FileKind.EXECUTION_TRACE], notes)
    return assemble_job(graphs, notes)


def assemble_job(graphs: list[ExecutionGraph], notes: Iterable[str] = ()) -> Job:
    """Return a ``Job`` of graphs already read: sorted by rank, with world size and missing ranks derived."""
    graphs = sorted(graphs, key=lambda graph: graph.meta.rank)
    return Job(graphs, *_size_notes_missing(graphs, notes))


def _size_notes_missing(graphs: Sequence[HasMeta], notes: Iterable[str]) -> tuple[int, list[str], list[int]]:
    """Return a job's world size, the notes with those on its ranks, and the ranks that are missing."""
    ranks = {graph.meta.rank for graph in graphs}
    size = max([len(graphs), *(graph.meta.world_size for graph in graphs), *(rank + 1 for rank in ranks)])
    found = [*notes, *_fake_world_notes(graphs)]
    missing = [] if ranks == {NONE} else missing_of(size, ranks)
    if missing and graphs and all(_stands_alone(graph) for graph in graphs):
        done, whose = ("were", "those") if len(graphs) > 1 else ("was", "that one")
        how = "traced by shapes" if graphs[0].meta.era == SHAPE_ONLY else "recorded, in a fake world"
        found.append(
            f"{len(graphs)} of {size} ranks {done} {how}; whether the others do the same as {whose} is not known: "
            "--rank gives another one.")
    elif missing:
        found.append(f"{len(missing)} of {size} ranks were not recorded ({listed(map(str, missing))}): what they "
                     "did is known only from the recorded ranks' waiting.")
    return size, found, missing


KeptRank = TypeVar("KeptRank", bound=HasMeta)
READ_FIRST = 3
"""Ranks whose work decides after how many steps the work of a job that is read rank by rank repeats. Chosen."""


@dataclass(frozen=True, slots=True)
class RanksKept(Generic[KeptRank]):
    """A job that was read rank by rank: what was kept of each rank, and the attributes of a ``Job``.

    Attributes:
        ranks: sorted by rank.
        files: the file of each rank.
    """

    ranks: list[KeptRank]
    files: list[FoundFile]
    world_size: int
    notes: list[str]
    missing_ranks: list[int]


def files_of_ranks(paths: Sequence[PathLike], notes: list[str]) -> list[FoundFile]:
    """Return the files of a job, to be read rank by rank: none is named by the user, and a capture has a directory a
    rank. The list is empty where ranks cannot be read alone: a capture of a fake world may represent other ranks."""
    parts = find_parts(paths[0]) if len(paths) == 1 else []
    if any(read_context(part.path).get("fake_world") is True for part in parts[:1]):
        return []
    if parts:
        notes += filter(None, [unlike_clocks([part for part in parts if part.windows])])
        return [FoundFile(os.fspath(part.path), FileKind.TRACE, sum(path.stat().st_size for path in part.windows[:1]),
                          False) for part in parts]
    return [replace(file, named=False) for file in find_files([os.fspath(path) for path in paths], notes)]


def read_by_rank(files: Sequence[FoundFile], keep: Callable[[ExecutionGraph], KeptRank],
                 take: Callable[[KeptRank], object] = bool, notes: Sequence[str] = (), *,
                 step_region: str | None = None, cycle: int | None = None) -> RanksKept[KeptRank]:
    """Read a job rank by rank; of each rank only what ``keep`` returns stays in memory.

    Args:
        files: as ``files_of_ranks`` returns them.
        keep: called in the process that read the rank; it may change the graph.
        take: called in this process with what was kept of each rank, for instance to add it up.
        notes: sentences on the files.
        step_region, cycle: as in ``read_job``; by default the first ``READ_FIRST`` files decide the cycle.

    Raises:
        As ``read_job``, except that a file that cannot be read is noted.
    """
    others = [file for file in files if file.kind is FileKind.EXECUTION_TRACE]
    traces = [file for file in files if file.kind is not FileKind.EXECUTION_TRACE]
    said, found = list(notes), list[tuple[KeptRank, FoundFile]]()
    first = [(graph, file) for file in traces[:READ_FIRST] for graph in _read_alone(file, others, said, step_region)]
    said += group_steps([graph for graph, _ in first], cycle) if first else []
    of_first = max((graph.meta.cycle for graph, _ in first), default=1)
    while first:
        graph, file = first.pop()
        found.append((keep(graph), file))
        take(found[-1][0])
        del graph
    left = traces[READ_FIRST:]
    one = partial(_read_and_keep, others=others, keep=keep, step_region=step_region, cycle=of_first)
    with _workers_for(left, None) as workers:
        for file, result in zip(left, (workers or ThisProcess()).map(one, left, name=lambda file: file.path),
                                strict=True):
            if isinstance(result, Failed):
                _kept(file, result, said)
            else:
                for rank in result[0]:
                    take(rank)
                    found.append((rank, file))
                said += result[1]
    found.sort(key=lambda pair: pair[0].meta.rank)
    ranks = [rank for rank, _ in found]
    if not ranks:
        raise TraceError(f"No profiler trace could be read from {listed(file.path for file in files)}"
                         f"{_why_none(list(files), said)} Give the .json or .json.gz files of the profiler.")
    _number_ranks(ranks, said)
    _check_one_job(ranks)
    there = {rank.meta.rank for rank in ranks}
    _join_execution_traces([], [file for file in others if rank_in_name(file.path) not in there], said)
    size, said, missing = _size_notes_missing(ranks, dict.fromkeys(said))
    return RanksKept(ranks, [file for _, file in found], size, said, missing)


def _read_alone(file: FoundFile, others: Sequence[FoundFile], notes: list[str],
                step_region: str | None) -> list[ExecutionGraph]:
    """Return the graphs of one file or directory of a capture's rank, joined to the execution traces of their ranks."""
    if file.kind is FileKind.GRAPH:
        graphs = _saved_member(file, notes, step_region)
    elif os.path.isdir(file.path):
        try:
            captured = read_capture(file.path, step_region=step_region)
        except TraceError as error:
            return _kept(file, Failed(error), notes)
        notes += captured.notes
        graphs = captured.graphs
    else:
        graphs = _read_member(file, notes, None, step_region)
    _number_ranks(graphs, notes)
    for graph in graphs:
        _join_execution_traces([graph], [other for other in others if rank_in_name(other.path) == graph.meta.rank],
                               notes)
    return graphs


def _read_and_keep(file: FoundFile, *, others: Sequence[FoundFile], keep: Callable[[ExecutionGraph], KeptRank],
                   step_region: str | None, cycle: int) -> tuple[list[KeptRank], list[str]]:
    """Return what is kept of one file's ranks, and notes on them."""
    notes = list[str]()
    graphs = _read_alone(file, others, notes, step_region)
    try:
        group_steps(graphs, cycle if graphs else None)
    except CycleError as error:
        return [], [*notes, f"Skipped: {error}"]
    return [keep(graph) for graph in graphs], notes


def assemble_captured(graphs: list[ExecutionGraph], notes: Iterable[str] = (),
                      classes: Sequence[tuple[Span, ...]] = ()) -> Job:
    """Assemble the ranks of a capture as ``assemble_job`` does. Raises ``JobError`` unless they are of one job.

    ``classes`` are those of a fake world with a known plan: a graph then represents all ranks of its class.
    """
    graphs = sorted(graphs, key=lambda graph: graph.meta.rank)
    _check_one_job(graphs)
    if not classes and all_alike(graphs):
        size = graphs[0].meta.world_size
        job = folded_job(graphs[:1], [((0, size - 1, 1),)], size, [*notes, *_fake_world_notes(graphs)])
        ranks = listed(str(graph.meta.rank) for graph in graphs)
        job.notes.append(
            f"{ASSUMED}: every rank does the same as {'rank' if len(graphs) == 1 else 'ranks'} {ranks}, because all "
            "collectives there are of the whole world, and none is of shards or between two ranks, as in plain data "
            "parallelism.")
        return job
    if not classes:
        return assemble_job(graphs, notes)
    told = [*notes, *_fake_world_notes(graphs)]
    alone = [next(ranks for ranks in classes if g.meta.rank in RankClass(ranks)) for g in graphs]
    kept = [graph for place, graph in enumerate(graphs) if alone[place] not in alone[:place]]
    if len(kept) < len(graphs):
        told.append(f"{len(graphs) - len(kept)} of the recorded ranks do the work of another one and are left out.")
    job = folded_job(kept, classes, sum(len(RankClass(ranks)) for ranks in classes), told)
    without = [each for each in job.classes if each.graph == NONE]
    if without:
        job.notes.append(
            f"{sum(map(len, without))} of {job.world_size} ranks ({listed(map(str, without))}) do other work than "
            f"those recorded; capture --rank {listed(str(each.first) for each in without)} into the same directory "
            "too.")
    return job


def folded_job(graphs: Sequence[ExecutionGraph], classes: Sequence[tuple[Span, ...]], world_size: int,
               notes: Iterable[str] = ()) -> Job:
    """Return a job of classes in which each class has at most one graph, from any of its ranks.

    Raises:
        JobError: a graph's rank is in no class, or two graphs are of one class.
    """
    ordered = sorted(graphs, key=lambda graph: graph.meta.rank)
    rows: dict[int, int] = {}
    found = [RankClass(ranks) for ranks in sorted(classes, key=lambda ranks: RankClass(ranks).first)]
    for row, graph in enumerate(ordered):
        place = next((place for place, each in enumerate(found) if graph.meta.rank in each), NONE)
        if place == NONE or place in rows:
            why = "is in none of the job's classes" if place == NONE else (
                f"does the same work as rank {ordered[rows[place]].meta.rank}, whose graph is there")
            raise JobError(f"Rank {graph.meta.rank} {why}; give one graph for each class of ranks.")
        rows[place] = row
    held = [replace(each, graph=rows.get(place, NONE)) for place, each in enumerate(found)]
    covered = {rank for each in held if each.graph != NONE for rank in each}
    return Job(list(ordered), world_size, list(notes), missing_of(world_size, covered), held)


def _stands_alone(graph: HasMeta) -> bool:
    """Return whether a graph's rank ran without the others, so that it holds no waiting for them."""
    return graph.meta.era == SHAPE_ONLY or graph.meta.backend == FAKE


def _fake_world_notes(graphs: Sequence[HasMeta]) -> list[str]:
    """Return the note on graphs whose collectives were faked while their compute was timed."""
    fake = [graph.meta for graph in graphs if graph.meta.backend == FAKE and graph.meta.era != SHAPE_ONLY]
    if not fake:
        return []
    which = f"Rank {fake[0].rank}" if len(fake) == 1 else f"Ranks {listed(str(meta.rank) for meta in fake)}"
    whose = "its" if len(fake) == 1 else "their"
    return [f"{which} of a fake world of {fake[0].world_size}: {whose} collectives took no time and other "
            "ranks were not waited for, so the step times are those of the compute alone."]


def save_job(job: Job, path: str | os.PathLike[str]) -> None:
    """Save all ranks of a job as one file, as ``save_graph`` saves a graph."""
    others = {part.name: getattr(job, part.name) for part in fields(job) if part.name != "graphs"}
    write_file(path, pack_graphs("job", list(job.graphs), others, os.fspath(path)))


def load_job(path: str | os.PathLike[str], *, step_region: str | None = None) -> Job:
    """Load a saved job; a file with one graph gives a job of its rank.

    It takes the arguments of ``load_graph``, and raises the same errors.
    """
    name = os.fspath(path)
    manifest, graphs = load_graphs(name, step_region)
    if manifest.kind == "graph":
        return assemble_job(graphs)
    hints = get_type_hints(Job)
    try:
        others = {
            part.name: convert(manifest.job[part.name], hints[part.name])
            for part in fields(Job) if part.name in manifest.job
        }
    except DecodeError as error:
        raise corrupt(name, f"its manifest cannot be read: {error}") from None
    job = Job(graphs, **others)
    _check_classes(job, name)
    return job


def _check_classes(job: Job, label: str) -> None:
    """Raise an error if a folded job's classes hold impossible ranks or refer to missing graphs."""
    size = max(job.world_size, 0)
    if size > MOST_RANKS or len(job.missing_ranks) > MOST_RANKS:
        raise corrupt(label, "it claims an impossible number of ranks")
    for each in job.classes:
        for first, last, step in each.ranks:
            if not (0 <= first <= last < size and step > 0 and (last - first) % step == 0):
                raise corrupt(label, "its classes hold ranks that the job does not have")
        if not NONE <= each.graph < len(job.graphs) or not each.ranks:
            raise corrupt(label, "its classes point to graphs that are not there")


def _saved_member(file: FoundFile, notes: list[str], step_region: str | None) -> list[ExecutionGraph]:
    """Return a saved file's graphs. An unreadable file raises if the user named it, else it is noted."""
    try:
        return load_job(file.path, step_region=step_region).graphs
    except GraphFileError as error:
        if file.named:
            raise
        notes.append(f"Skipped: {error}")
        return []


def _read_members(files: Sequence[FoundFile], notes: list[str], progress: Callable[[int, int], None] | None,
                  workers: TaskWorkers | None, step_region: str | None) -> list[ExecutionGraph]:
    """Return the graphs of saved files and traces; skipped files are noted."""
    traces = [file for file in files if file.kind is not FileKind.GRAPH]
    with _workers_for(traces, workers) as found:
        if found is None:
            return _read_each(files, notes, progress, None, step_region)
        elsewhere = found.map(partial(kineto.read_processes, step_region=step_region), [file.path for file in traces])
        return _read_each(files, notes, progress, elsewhere, step_region)


@contextmanager
def _workers_for(traces: Sequence[FoundFile], workers: TaskWorkers | None) -> Iterator[TaskWorkers | None]:
    """Yield the given workers or copies of this process; ``None`` if this process shall read the traces itself."""
    many = idle_cores()
    if workers is not None and workers.elsewhere:
        yield workers
    elif min(many, len(traces)) < 2 or sum(map(_text_bytes, traces)) < LEAST_BYTES or any(
            "://" in trace.path for trace in traces):
        yield None
    else:
        kineto.ready_to_read()
        with ForkedWorkers(min(many, len(traces))) as found:
            yield found


def _text_bytes(trace: FoundFile) -> int:
    """Return the approximate length of a trace's text, bytes."""
    return trace.size * (UNPACKED if trace.path.endswith(".gz") else 1)


def _read_each(files: Sequence[FoundFile], notes: list[str], progress: Callable[[int, int], None] | None,
               elsewhere: Iterator[list[ExecutionGraph] | Failed] | None,
               step_region: str | None) -> list[ExecutionGraph]:
    """Return the graphs of all files, traces from ``elsewhere`` if it is given; skipped files are noted."""
    graphs: list[ExecutionGraph] = []
    total, done = sum(file.size for file in files), 0
    for file in files:
        if file.kind is FileKind.GRAPH:
            graphs += _saved_member(file, notes, step_region)
        else:
            graphs += _read_member(file, notes, shifted(progress, done, total), step_region) if elsewhere is None \
                else _kept(file, next(elsewhere), notes)
        done += file.size
        if elsewhere is not None and progress is not None:
            progress(done, total)
    return graphs


def _read_member(file: FoundFile, notes: list[str], progress: Callable[[int, int], None] | None,
                 step_region: str | None) -> list[ExecutionGraph]:
    """Return the graph of a file, or those of its processes. A file that is no trace raises if the user named it, else
    it is noted."""
    try:
        return kineto.read_processes(file.path, progress=progress, step_region=step_region)
    except TraceError as error:
        return _kept(file, Failed(error), notes)


def _kept(file: FoundFile, found: list[ExecutionGraph] | Failed, notes: list[str]) -> list[ExecutionGraph]:
    """Return a file's graphs, or none if its workers died: that is noted, and reading continues."""
    if not isinstance(found, Failed):
        return found
    if not isinstance(found.error, TraceError) or (file.named and not isinstance(found.error, LostWorkerError)):
        raise found.error
    notes.append(f"Skipped: {found.error}")
    return []


def _number_ranks(graphs: Sequence[HasMeta], notes: list[str]) -> None:
    unknown = [graph for graph in graphs if graph.meta.rank == NONE]
    for graph in unknown:
        graph.meta.rank = rank_in_name(graph.meta.source)
        if graph.meta.rank != NONE:
            notes.append(f"{graph.meta.source} does not record its rank; {graph.meta.rank} was taken from its name.")
    nameless = [graph.meta.source for graph in graphs if graph.meta.rank == NONE]
    if nameless and len(graphs) > 1:
        raise JobError(f"{listed(nameless)} record no rank and have none in their names, so that they cannot be told "
                       "apart as ranks of one job; read them one at a time, or name them rank0…, rank1….")


def _check_one_job(graphs: Sequence[HasMeta]) -> None:
    for first, second in pairwise(graphs):
        if first.meta.rank == second.meta.rank:
            raise JobError(f"Rank {first.meta.rank} is there twice ({first.meta.source}, {second.meta.source}): files "
                           "of two jobs, or two windows of one, are mixed; give one file for each rank (other captures "
                           "of the same program go to foretrace predict with --also).")
    regions = {graph.meta.step_region: graph.meta.source for graph in graphs}
    if len(regions) > 1:
        (one, file_a), (other, file_b) = list(regions.items())[:2]
        named, others = [repr(name) if name else "no region" for name in (one, other)]
        raise JobError(f"The steps in {file_a} are marked by {named}, those in {file_b} by {others}: ranks of one job "
                       "need the same steps; convert their traces again with one --step-region.")
    sizes = {graph.meta.world_size: graph.meta.source for graph in graphs if graph.meta.world_size > 0}
    if len(sizes) > 1:
        (size_a, file_a), (size_b, file_b) = list(sizes.items())[:2]
        raise JobError(f"{file_a} is of a job with {size_a} ranks, {file_b} of one with {size_b}: files of different "
                       "jobs are mixed; give those of one job.")
    for size in sizes:
        last = graphs[-1].meta
        if last.rank >= size:
            raise JobError(f"{last.source} is rank {last.rank}, but the job has only {size} ranks: files of "
                           "different jobs are mixed; give those of one job.")
    windows = sorted((g.meta.base_time_ns, g.meta.base_time_ns + g.meta.window_ns, g.meta.source) for g in graphs
                     if g.meta.base_time_ns > EPOCH_NS)
    longest = max((end - start for start, end, _ in windows), default=0)
    reached, reached_by = (windows[0][1], windows[0][2]) if windows else (0, "")
    for start, end, source in windows:
        if start - reached > max(APART_NS, APART_WINDOWS * longest):
            raise JobError(f"{source} was recorded {(start - reached) / 1e9:,.0f} s after {reached_by} ended: files of "
                           "different runs are mixed; give those of one run.")
        if end > reached:
            reached, reached_by = end, source


def _join_execution_traces(graphs: list[ExecutionGraph], files: list[FoundFile], notes: list[str]) -> None:
    """Join each rank's first execution trace; they are paired by the rank in the file names, else by order."""
    if not files:
        return
    by_rank: dict[int, list[FoundFile]] = {}
    for file in files:
        by_rank.setdefault(rank_in_name(file.path), []).append(file)
    nameless = by_rank.pop(NONE, [])
    open_graphs = [graph for graph in graphs if graph.meta.rank not in by_rank]
    if nameless and (len(nameless) == len(open_graphs) or len(open_graphs) == 1):
        for graph, file in zip(open_graphs, nameless, strict=False):
            by_rank.setdefault(graph.meta.rank, []).append(file)
        if len(open_graphs) == 1:
            by_rank[open_graphs[0].meta.rank] = nameless
    elif nameless:
        notes.append(f"{listed(file.path for file in nameless)}: execution traces without a rank in their names, "
                     "which could not be told apart; name them like the profiler traces.")
    for graph in graphs:
        candidates = sorted(by_rank.pop(graph.meta.rank, []), key=lambda file: (not file.named, file.path))
        if not candidates:
            continue
        if len(candidates) > 1:
            notes.append(f"Rank {graph.meta.rank} has {len(candidates)} execution traces; {candidates[0].path} was "
                         f"joined, not {listed(file.path for file in candidates[1:])}.")
        try:
            report = join_execution_trace(graph, candidates[0].path)
            notes += [f"{candidates[0].path}: {note}" for note in report.notes]
        except TraceError as error:
            if candidates[0].named:
                raise
            notes.append(f"An execution trace was not joined: {error}")
    notes += [f"{listed(file.path for file in left)}: no profiler trace of that rank to join it to."
              for left in by_rank.values()]


def _why_none(files: list[FoundFile], notes: list[str]) -> str:
    if notes:
        return ": " + " ".join(notes)
    if any(file.kind is FileKind.EXECUTION_TRACE for file in files):
        return ": only execution traces are there, which have no times."
    return "."
