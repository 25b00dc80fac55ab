"""Runs items within limits of time and size, one by one, so that a run may be killed and resumed at any point.

The items come from a source: a plan's list, or a source that chooses the next by the results (``campaign.source``).
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tracer.campaign.items import Item, rehearsed
from tracer.campaign.plan import CampaignError, Plan
from tracer.campaign.processes import WorkerDied, Workers
from tracer.campaign.record import Answer, Task, is_device_error
from tracer.campaign.results import ItemResult, Results, ended
from tracer.campaign.source import ItemSource, PlanItems
from tracer.campaign.tables import KERNELS, merge_parts, write_part
from tracer.output_file import FULL, free_text, full_disk_error, writing_error

GRACE_S = 30.0
"""Seconds after the end of the time box at which a running item is stopped."""
LEAST_TIMEOUT_S, TIMEOUT_FACTOR = 60.0, 8.0
"""Least seconds, and multiple of the expected time, after which an item times out."""
GRAPH_SHARE, LEAST_GRAPHS = 0.75, 12
"""Largest share of the size for full graphs together; one graph may take at most a twelfth of that."""
FLUSH_S, FLUSH_ITEMS = 2.0, 64
"""Seconds and items after which a batch of micro-benchmarks is written; a kill loses the unwritten batch."""
MOST_FAILURES = 10
"""Failures in a row that indicate a broken device or machine."""
BOX_ENDED = "the time box has ended."
_MB = 1_000_000


@dataclass(frozen=True)
class RunOptions:
    """Options of a plan's run.

    Attributes:
        minutes: Time box. No item is started whose expected end is later.
        max_mb: Most megabytes (10⁶ bytes) of the directory.
        part: Which part of the plan, from 1; None for all.
        resume: Continue in a directory that holds results; failed items are tried again, last.
        rehearse: Tiny sizes, on the CPU; everything else is the same.
        say: Called with a line about progress.
    """

    minutes: float = 9.0
    max_mb: float = 30.0
    part: int | None = None
    resume: bool = False
    rehearse: bool = False
    say: Callable[[str], None] = field(default=lambda line: None)


@dataclass
class CampaignOutcome:
    """The results of a run. ``left`` items did not fit into its time, ``unwritten`` items not into its megabytes."""

    results: list[ItemResult]
    planned: int
    done_before: int
    left: int
    seconds: float
    stopped: str = ""


def run(plan: Plan, out: str | os.PathLike[str], options: RunOptions) -> CampaignOutcome:
    """Run a plan, or continue it.

    Raises:
        CampaignError: the plan or an option is wrong, the directory belongs to another run, torch or the device cannot
            be used, or not one item worked.
    """
    return run_items(PlanItems(plan, options.part), out, options)


def run_items(source: ItemSource, out: str | os.PathLike[str], options: RunOptions) -> CampaignOutcome:
    """Run the items of a source, or continue them; ``options.part`` is left to the source.

    Raises:
        CampaignError: as ``run``.
    """
    return _Run(source, out, options).go()


class _Run:
    def __init__(self, source: ItemSource, out: str | os.PathLike[str], options: RunOptions) -> None:
        if not (options.minutes > 0 and options.max_mb > 0):  # NaN is not
            raise CampaignError("The minutes and the megabytes of a campaign must be above 0.")
        self._started = time.monotonic()
        self._deadline = self._started + options.minutes * 60
        self._source, self._setup, self._options = source, source.setup, options
        self._results = Results(out)
        self._device = "cpu" if options.rehearse else self._setup.device
        self._threads = 1 if options.rehearse and not self._setup.threads else self._setup.threads
        self._factors: dict[str, list[float]] = {}
        self._batch: list[tuple[ItemResult, list[dict[str, Any]]]] = []
        self._flushed, self._batches = time.monotonic(), 0
        self._session = 0
        self._first_of_process = False
        self._used: int | None = None
        self._new: list[ItemResult] = []

    def go(self) -> CampaignOutcome:
        results, source = self._results, self._source
        results.open(self._setup.name, self._setup.description, resume=self._options.resume,
                     rehearsal=self._options.rehearse)
        workers = Workers(self._device, self._threads, results.scratch)
        try:
            before = source.begin(results.lines)
            self._learn_from_lines()
            stopped = ""
            if source.left():
                with _disk(results.path):
                    self._begin(workers)
                stopped = self._run_all(workers)
            return CampaignOutcome(self._new, source.planned(), before, source.left(), time.monotonic() - self._started,
                                   stopped)
        finally:
            workers.close()
            try:
                self._finish()
            finally:
                results.close()

    def _learn_from_lines(self) -> None:
        lines = self._results.lines
        for item in self._source.known():
            if item.id in lines and lines[item.id].status == "ok":
                self._learn(item, lines[item.id].seconds)

    def _begin(self, workers: Workers) -> None:
        context = dict(workers.take(fresh=True).context or {})
        known = {"part": self._setup.part, "parts": self._setup.parts, "minutes": self._options.minutes}
        self._source.started(context)  # raises for another device than that of the results
        self._session = self._results.begin_session({**known, **context})

    def _run_all(self, workers: Workers) -> str:
        """Run the source's items until no more fit; return why it stopped early, empty if it did not."""
        source, failures, first = self._source, 0, self._source.left()
        while (item := source.next(self._fits)) is not None:
            if self._room() <= 0:
                return f"the directory has reached {self._options.max_mb:g} MB."
            start = time.monotonic()
            with _disk(self._results.path):
                result, rows = self._one(item, workers)
            result.seconds = round(time.monotonic() - start, 3)
            if item.visit > 1:
                self._keep_visit(result, rows)
                source.record(item, result, rows)
                continue
            if result.status == "ok":
                starts = item.kind == "kernel" and self._first_of_process
                self._learn(item, min(result.seconds, item.seconds) if starts else result.seconds)
            failures = failures + 1 if result.status == "failed" else 0
            self._keep(result, rows)
            source.record(item, result, rows)
            if result.kind == "workload" or result.status != "ok":
                self._options.say(_line(result, len(self._new), first))
            if failures >= MOST_FAILURES and source.left():
                self._flush()
                return f"the last {failures} items all failed."
        self._flush()
        if self._new and all(result.status != "ok" for result in self._new) and not self._results.index.ok:
            raise CampaignError(f"Not one of {len(self._new)} items worked; the first, {self._new[0].name}: "
                                f"{self._new[0].reason}")
        return source.stopped() or (BOX_ENDED if source.left() else "")

    def _fits(self, item: Item) -> bool:
        """Return whether an item is expected to end within the time box."""
        return time.monotonic() + self._expected(item) <= self._deadline

    def _one(self, item: Item, workers: Workers) -> tuple[ItemResult, list[dict[str, Any]]]:
        """Record one item; a failure of the worker is the item's result."""
        asked = rehearsed(item) if self._options.rehearse else item
        expected = self._expected(item)
        timeout = min(max(LEAST_TIMEOUT_S, TIMEOUT_FACTOR * expected), self._deadline + GRACE_S - time.monotonic())
        until = time.monotonic() + timeout
        values: dict[str, Any] = {}
        try:
            worker = workers.take(fresh=item.needs_fresh_process)
            self._first_of_process = not worker.tasks_done  # it starts the profiler and libraries, for seconds
            worker.ask(Task(asked, str(self._results.scratch), self._graph_room()))
            answer = worker.answer(timeout)
            if answer.phase == "measured":
                values = answer.values
                workers.prepare_next()
                answer = worker.answer(max(1.0, until - time.monotonic()))
        except WorkerDied as error:
            workers.drop()
            self._clear(item)
            if (full := writing_error(self._results.scratch)) is not None and full.errno in FULL:
                raise CampaignError(_disk_is_full(self._results.path)) from error
            if values:  # the steps were measured; only the trace is lost
                notes = [*values.pop("notes", []), f"The trace could not be kept: {error}"]
                return ended(asked, "ok", session=self._session, content="times", notes=notes, **values), []
            return ended(asked, "failed", reason=str(error)[:1].upper() + str(error)[1:], session=self._session), []
        if answer.phase != "done":
            self._clear(item)
        if answer.disk_full:
            inside = answer.disk_full == str(self._results.scratch)
            raise CampaignError(_disk_is_full(self._results.path if inside else Path(answer.disk_full)))
        if answer.phase != "done":
            if is_device_error(answer.reason) or item.kind == "workload":
                workers.drop()  # after an error, a device stays unusable for its process
            return ended(asked, answer.values.get("status", "failed"), reason=answer.reason,
                         session=self._session), []
        return self._done(asked, answer), answer.rows

    def _clear(self, item: Item) -> None:
        """Remove the files of a failed capture: the next one needs the room."""
        shutil.rmtree(self._results.scratch / item.id, ignore_errors=True)

    def _done(self, item: Item, answer: Answer) -> ItemResult:
        result = ended(item, "ok", session=self._session, **{**answer.values, "file": ""})
        if answer.file:
            source = self._results.scratch / answer.file
            if source.stat().st_size > self._room():
                source.unlink()
                result.content = "times"
                result.notes.append("The directory is full, so that only the times were kept.")
            else:
                folder = "graphs" if result.content == "graph" else "tables"
                result.file = self._results.adopt_file(source, folder, source.name)
                self._used = None
        return result

    def _keep_visit(self, result: ItemResult, rows: list[dict[str, Any]]) -> None:
        """Add the rows and seconds of a further visit to those of the first; a failed visit changes nothing."""
        waiting = {kept.id: kept for kept, _ in self._batch}
        first = waiting.get(result.id) or self._results.lines.get(result.id)
        if first is None or not rows:
            return
        self._wait_for_flush(msgspec.structs.replace(first, seconds=round(first.seconds + result.seconds, 3)), rows)

    def _keep(self, result: ItemResult, rows: list[dict[str, Any]]) -> None:
        self._new.append(result)
        if not rows and result.kind == "workload":
            self._results.save([result])
            self._used = None
            return
        if rows:
            result.file = f"{KERNELS}/{result.name}.parquet"
        self._wait_for_flush(result, rows)

    def _wait_for_flush(self, result: ItemResult, rows: list[dict[str, Any]]) -> None:
        common = {"id": result.id, "session": self._session, "split": result.split, **result.settings}
        self._batch.append((result, [{**common, **row} for row in rows]))
        if time.monotonic() - self._flushed > FLUSH_S or len(self._batch) >= FLUSH_ITEMS:
            self._flush()

    def _flush(self) -> None:
        """Write the batch's rows, then its lines: so no line exists without its rows."""
        batch, self._batch = self._batch, []
        self._flushed = time.monotonic()
        if not batch:
            return
        self._used = None
        folder = self._results.path / KERNELS
        for family in sorted({result.name for result, rows in batch if rows}):
            self._batches += 1
            rows = [row for result, rows in batch if result.name == family for row in rows]
            with _disk(folder):
                write_part(folder, self._results.scratch, family, f"{self._session:03d}-{self._batches:05d}", rows)
        self._results.save(result for result, _ in batch)
        worked = Counter(result.name for result, rows in batch if rows)
        self._options.say(f"{time.monotonic() - self._started:.0f} s: micro-benchmarks: "
                          f"{', '.join(f'{number} {name}' for name, number in worked.items())}")

    def _finish(self) -> None:
        if not self._results.scratch.is_dir():
            return
        self._flush()
        with _disk(self._results.path):
            merge_parts(self._results.path / KERNELS, self._results.scratch)
        if self._results.index.sessions:
            self._results.save([])

    def _learn(self, item: Item, seconds: float) -> None:
        for key in (item.alike, item.kind):
            self._factors.setdefault(key, []).append(seconds / item.seconds)

    def _expected(self, item: Item) -> float:
        """Return the plan's seconds times the upper quartile of actual over planned time of similar items or kinds."""
        factors = self._factors.get(item.alike) or self._factors.get(item.kind) or [1.0]
        upper = statistics.quantiles(factors, n=4)[2] if len(factors) > 2 else max(factors)
        return item.seconds * upper

    def _room(self) -> float:
        """Return the bytes left for a graph; files are only measured again after one was written."""
        if self._used is None:
            self._used = self._results.bytes_used()
        return self._options.max_mb * _MB - self._used

    def _graph_room(self) -> int:
        share = GRAPH_SHARE * self._options.max_mb * _MB
        return int(max(0.0, min(share / LEAST_GRAPHS, share - self._results.graph_bytes())))


@contextmanager
def _disk(path: Path) -> Iterator[None]:
    """Turn an error of the disk into a ``CampaignError`` of one sentence."""
    try:
        yield
    except OSError as error:
        if full_disk_error(error) is not None:
            raise CampaignError(_disk_is_full(path)) from error
        raise CampaignError(f"Results cannot be written to {path} ({error.strerror or error}): free space, and go on "
                            "with --resume.") from error


def _disk_is_full(folder: Path) -> str:
    facts = free_text(folder)
    return (f"The campaign stopped because the disk of {folder} is too full for the next item"
            f"{f' ({facts})' if facts else ''}: free space, and go on with --resume; what is done is kept.")


def _line(result: ItemResult, number: int, count: int) -> str:
    sizes = " ".join(f"{name}={value}" for name, value in list(result.settings.items())[:8])
    if result.status != "ok":
        return f"{number}/{count} {result.name} {sizes}: {result.status}: {result.reason}"
    step = f"{result.median_ns / 1e6:.3f} ms" if result.median_ns is not None else "–"
    return f"{number}/{count} {result.name} {sizes}: {step}, {result.content}, {result.seconds:.1f} s"


def count_by(results: list[ItemResult]) -> dict[tuple[str, str], Counter[str]]:
    """Return for each (kind, name) the counts of each status and side."""
    found: dict[tuple[str, str], Counter[str]] = {}
    for result in results:
        counter = found.setdefault((result.kind, result.name), Counter())
        counter[result.status] += 1
        if result.status == "ok":
            counter[result.split] += 1
    return found
