"""Several processes in one file: which process each event belongs to.

Some tools put the traces of a job's ranks into one file. Each process numbers its launches by itself, so that two
processes may use the same number. The process that launches on a device owns the device's work::

    process 1000   launch 5000 ─┐          process 2000   launch 5000 ─┐
    device 0            kernel 5000        device 1            kernel 5000
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from tracer.arrays import Bool, Int64
from tracer.columns import named
from tracer.errors import TraceError
from tracer.graph import LAUNCHING
from tracer.kineto.columns import Collector
from tracer.kineto.events import NameGroup, call_kind
from tracer.lazy import optimize

MOST_PROCESSES = 256
"""Most processes of one file: it is read once for each."""
READ_A_BYTE, FREE_READ = 2, 1 << 22
"""Events that are read for all processes together for each stored byte, and those of any file: four million take some
seconds. A compressed trace has an event in 14 to 33 bytes, so that it may have 28 processes or more."""


@dataclass(frozen=True, eq=False)
class ProcessPart:
    """The events of one process.

    Attributes:
        pid: The process's number, as written in the file.
        correlations: Correlation numbers of its launches that no other process has, ascending.
        devices: Devices on which only this process launches: their work belongs to it, under any correlation number.
        unique: Correlation numbers that exactly one process of the file used, ascending.
        in_order: Whether processes and devices were paired in order, as the file does not show which belong together.
    """

    pid: str
    correlations: Int64
    devices: frozenset[int]
    unique: Int64
    in_order: bool

    def owns(self, device: Int64, correlation: Int64) -> np.ndarray:
        """Return a mask of the device work that belongs to the process."""
        on_own = np.isin(device, np.array(sorted(self.devices), np.int64))
        return np.isin(correlation, self.correlations) | (on_own & ~np.isin(correlation, self.unique))


def processes_of(collected: Collector, source: str, stored_bytes: int) -> list[ProcessPart]:
    """Find the processes of a file that are ranks, in the order of their numbers; empty if there is at most one.

    A rank ran operations, and launched device work or marked its steps. Other processes (a helper that reads a device's
    memory, or a process with a mark and no operation) stay with the only rank of their file.

    Raises:
        TraceError: The device work of two processes cannot be separated.
    """
    pids = [pid for pid, _ in collected.threads.keys_in_order]
    names = sorted(set(pids), key=_by_number)
    if len(names) < 2:
        return []
    place = {name: at for at, name in enumerate(names)}
    of_thread = np.array([place[pid] for pid in pids], np.int64)
    operations, calls, work, syncs = (_peeked(collected, group) for group in (
        NameGroup.OPERATION, NameGroup.CALL, NameGroup.DEVICE, NameGroup.SYNC))
    of_operation, of_call = of_thread[operations["thread"]], of_thread[calls["thread"]]
    strings = list(collected.strings)
    marks = named(operations["name"], strings, lambda text: text.startswith("ProfilerStep"))
    ranks = np.union1d(of_operation[marks], of_call[_launched(calls, of_call, work["correlation"], strings)])
    hosts = np.intersect1d(of_operation[~(marks | operations["annotation"])], ranks).tolist()
    if len(hosts) < 2:
        return []
    events = collected.loss.events_read
    if len(hosts) > MOST_PROCESSES or len(hosts) * events > max(FREE_READ, READ_A_BYTE * stored_bytes):
        raise TraceError(f"{source} holds {len(hosts):,} processes, too many to be read from one file of {events:,} "
                         "events: give the trace of each process by itself.")
    noted = _launched(calls, of_call, np.concatenate([work["correlation"], syncs["correlation"]]), strings)
    launches = [_Launches.of(calls, noted & (of_call == host)) for host in hosts]
    numbers, times = np.unique(np.concatenate([each.correlation for each in launches]), return_counts=True)
    shared = numbers[times > 1]
    operated = [np.unique(operations["external_id"][of_operation == host]) for host in hosts]
    found = _devices(launches, shared, operated, work)
    if found is None:
        raise TraceError(f"{source} holds {len(hosts)} processes whose launches have the same numbers, so that their "
                         "device work cannot be told apart: it was merged from several traces. Give the trace of "
                         "each process by itself.")
    devices, in_order = found
    unique = np.setdiff1d(numbers, shared)
    return [ProcessPart(names[host], np.setdiff1d(each.correlation, shared), frozenset(own), unique, in_order)
            for host, each, own in zip(hosts, launches, devices, strict=True)]


@dataclass(frozen=True, eq=False)
class _Launches:
    """The correlation numbers of a process's calls that a device noted, ascending, and the start of each (ns)."""

    correlation: Int64
    start_ns: Int64

    @classmethod
    def of(cls, calls: dict[str, np.ndarray], rows: np.ndarray) -> _Launches:
        rows = np.flatnonzero(rows & (calls["correlation"] > 0))
        correlation, first = np.unique(calls["correlation"][rows], return_index=True)
        return cls(correlation.astype(np.int64), calls["start"][rows[first]])

    def possible(self, correlation: Int64, start_ns: Int64) -> int:
        """Return how much device work these launches may have started: work with their numbers, but no earlier."""
        if not len(self.correlation):
            return 0
        at = np.minimum(np.searchsorted(self.correlation, correlation), len(self.correlation) - 1)
        return int(((self.correlation[at] == correlation) & (start_ns >= self.start_ns[at])).sum())


def _by_number(pid: str) -> list[str | tuple[int, str]]:
    """Return a key that sorts 9998 before 10002, and "rank 2" before "rank 10"."""
    return [(len(part.lstrip("0")), part.lstrip("0")) if at % 2 else part
            for at, part in enumerate(re.split(r"([0-9]+)", pid))]


def _peeked(collected: Collector, group: NameGroup) -> dict[str, np.ndarray]:
    """Return the columns of a group without removing them from the collector."""
    columns = collected.finish(group)
    collected.restore(group, columns)
    return columns


def _launched(calls: dict[str, np.ndarray], of_call: Int64, ran: Int64, strings: list[str]) -> Bool:
    """Return a mask of the calls whose number ran on a device, [calls]; where processes share it, only launches."""
    pairs = np.unique(np.stack([calls["correlation"], of_call]), axis=1)[0]
    given, times = np.unique(pairs, return_counts=True)
    launching = named(calls["name"], strings, lambda text: call_kind(text) in LAUNCHING)
    return np.isin(calls["correlation"], ran) & (launching | np.isin(calls["correlation"], given[times == 1]))


def _devices(launches: list[_Launches], shared: Int64, operated: list[Int64],
             work: dict[str, np.ndarray]) -> tuple[list[set[int]], bool] | None:
    """Return the devices that each process has alone, and whether they were only paired in order; ``None`` where they
    cannot be found.

    A device is the process's whose unshared numbers ran there, or whose operations its work names (`External id`). If
    neither decides, each process has one device: the one whose work began after its launches, or the next one.
    """
    found: list[set[int]] = [set() for _ in launches]
    left: list[tuple[int, np.ndarray]] = []
    for device in np.unique(work["device"]).tolist():
        rows = np.flatnonzero(work["device"] == device)
        numbers = work["correlation"][rows]
        by = [at for at, own in enumerate(launches) if np.isin(numbers, np.setdiff1d(own.correlation, shared)).any()]
        unclear = bool(np.isin(numbers, shared).any())
        if unclear and len(by) != 1:
            by = _named_by(work["external_id"][rows], numbers, operated)
        if len(by) == 1:
            found[by[0]].add(device)
        elif unclear:
            left.append((device, rows))
    without = [at for at, own in enumerate(found) if not own]
    if left and len(left) != len(without):
        return None
    ran = np.intersect1d(shared, work["correlation"])
    if not left:
        # A process's work is mixed with another's on the other's device: it cannot be separated.
        lost = any(np.isin(launches[host].correlation, ran).any() for host in without)
        return None if lost else (found, False)
    possible = np.array([[launches[host].possible(work["correlation"][rows], work["start"][rows])
                          for _, rows in left] for host in without], np.int64)
    for host, at in zip(without, _pairing(possible), strict=True):
        found[host].add(left[at][0])
    return found, bool((possible == possible[:, :1]).all()) and len(left) > 1


def _named_by(external_id: Int64, correlation: Int64, operated: list[Int64]) -> list[int]:
    """Return the processes whose operations device work names, without ids that several processes have.

    In 2022 and 2023 `External id` was the work's own number: it names no operation.
    """
    ids, times = np.unique(np.concatenate(operated), return_counts=True)
    named = np.intersect1d(external_id[(external_id >= 0) & (external_id != correlation)], ids[times == 1])
    return [at for at, own in enumerate(operated) if np.isin(named, own).any()]


def _pairing(possible: Int64) -> list[int]:
    """Return each process's device, so that most work may belong to its process; in order if that is equally good."""
    _, best = optimize.linear_sum_assignment(possible, maximize=True)
    in_order = np.arange(len(possible))
    as_good = possible[in_order, in_order].sum() >= possible[in_order, best].sum()
    return (in_order if as_good else best).tolist()
