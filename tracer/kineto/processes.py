"""Several processes in one file: whose each event is.

Some tools put the traces of a job's ranks into one file. Each process numbers its launches by itself, so that numbers
of one may be those of another; what a device did is told apart by the process that launched on it::

    process 1000   launch 5000 ─┐          process 2000   launch 5000 ─┐
    device 0            kernel 5000        device 1            kernel 5000
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tracer.arrays import Int64
from tracer.errors import TraceError
from tracer.kineto.columns import Collector
from tracer.kineto.names import NameGroup


@dataclass(frozen=True, eq=False)
class ProcessPart:
    """What is one process's own.

    Attributes:
        pid: its number, as the file writes it.
        correlations: of its launches that no other process has, ascending.
        devices: those it alone launches on: their work is its own, whatever its number.
        unique: those that one process alone gave, ascending.
    """

    pid: str
    correlations: Int64
    devices: frozenset[int]
    unique: Int64

    def owns(self, device: Int64, correlation: Int64) -> np.ndarray:
        """Return which device work is the process's."""
        on_own = np.isin(device, np.array(sorted(self.devices), np.int64))
        return np.isin(correlation, self.correlations) | (on_own & ~np.isin(correlation, self.unique))


def processes_of(collected: Collector, source: str) -> list[ProcessPart]:
    """Find the processes of a file that ran operations and launched work; empty where there is one at most.

    Raises:
        TraceError: the device work of two processes cannot be told apart.
    """
    pids = [pid for pid, _ in collected.threads.keys_in_order]
    if len(set(pids)) < 2:
        return []
    of_thread = np.array([sorted(set(pids)).index(pid) for pid in pids], np.int64)
    operations, calls, work = (_peeked(collected, group) for group in (
        NameGroup.OPERATION, NameGroup.CALL, NameGroup.DEVICE))
    owner = of_thread[calls["thread"]]
    hosts = np.intersect1d(of_thread[operations["thread"]], owner)
    if len(hosts) < 2:
        return []
    own = {int(host): np.unique(calls["correlation"][(owner == host) & (calls["correlation"] > 0)]) for host in hosts}
    numbers, times = np.unique(np.concatenate(list(own.values())), return_counts=True)
    unique = numbers[times == 1]
    devices = _devices(own, unique, work["device"].astype(np.int64), work["correlation"].astype(np.int64), source)
    names = sorted(set(pids))
    return [ProcessPart(names[host], np.intersect1d(own[host], unique), devices[host], unique) for host in own]


def _peeked(collected: Collector, group: NameGroup) -> dict[str, np.ndarray]:
    """The columns of a group, which the collector keeps."""
    columns = collected.finish(group)
    collected.restore(group, columns)
    return columns


def _devices(own: dict[int, Int64], unique: Int64, device: Int64, correlation: Int64,
             source: str) -> dict[int, frozenset[int]]:
    """Return the devices that are one process's, by process: those on which its own numbers ran; where all numbers are
    several processes', as many devices as processes are taken in order."""
    hosts = list(own)
    found: dict[int, set[int]] = {host: set() for host in hosts}
    open_devices = []
    for each in np.unique(device).tolist():
        ran = correlation[device == each]
        by = [host for host in hosts if np.isin(ran, np.intersect1d(own[host], unique)).any()]
        if len(by) == 1:
            found[by[0]].add(each)
        elif np.isin(ran, np.setdiff1d(np.concatenate(list(own.values())), unique)).any():
            open_devices.append(each)
    without = [host for host in hosts if not found[host]]
    if open_devices and len(open_devices) != len(without):
        raise TraceError(f"{source} holds {len(hosts)} processes whose launches have the same numbers, so that their "
                         "device work cannot be told apart: it was merged from several traces. Give the trace of "
                         "each process by itself.")
    for host, each in zip(without, open_devices, strict=False):
        found[host].add(each)
    return {host: frozenset(each) for host, each in found.items()}
