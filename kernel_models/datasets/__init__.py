"""Measurements: tables of several known forms and traces, read into ``Samples`` of measured calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernel_models.datasets.forms import read_table
from kernel_models.datasets.samples import HELD_OUT_SHARE, DataError, Samples, is_held_out, joined
from kernel_models.datasets.tables import is_table
from kernel_models.datasets.traces import HostWork, devices_of, read_job_samples
from kernel_models.device import DeviceSpec
from tracer.errors import ForetraceError, JobError
from tracer.files import find_files
from tracer.graph import ExecutionGraph
from tracer.job import read_job

KERNELS = "kernels"
"""Name of the folder of tables in a campaign's directory."""


def read_samples(
    paths: Sequence[str], progress: Callable[[str], None] = lambda text: None, *, spec: DeviceSpec | None = None,
    notes: list[str] | None = None, host_work: Callable[[ExecutionGraph], HostWork] | None = None,
) -> list[Samples]:
    """Read samples of tables (Parquet, CSV), of campaigns' directories, and of anything that ``tracer.read_job`` reads.

    Unreadable files in a directory of tables or traces are skipped; a path given by itself must be readable.

    Args:
        paths: Files, directories, globs or URLs.
        progress: Called with the name of what is being read.
        spec: The wanted device: tables without a device's name are assumed to be of it, traces of others are left out.
        notes: Receives sentences on what was left out and why.
        host_work: Returns the computing time of the operations of a CPU's trace; without it such traces are left out.

    Raises:
        DataError, TableInputError, TraceError: A path cannot be read, or nothing in it can be learned from.
    """
    found: list[Samples] = []
    told = [] if notes is None else notes
    reader = _Reader(spec, told, host_work)
    for name in paths:
        path = Path(name)
        progress(f"reading {path.name}")
        local = "://" not in name
        if local and path.is_dir() and (path / KERNELS).is_dir():
            tables = sorted((path / KERNELS).glob("*.parquet"))
            if not tables:
                raise DataError(f"{name} is a campaign without tables of micro-benchmarks; run its kernels first.")
            found += _campaign(tables)
        elif local and path.is_dir() and (tables := sorted(p for p in path.iterdir() if is_table(p.name))):
            found += reader.singly(name, [str(table) for table in tables])
        elif local and is_table(name):
            found += read_table(path, spec, told)
        else:
            found += reader.traces(name, alone=spec is None or len(paths) == 1)
    if not found and told:
        raise DataError(f"Nothing in the data can be used; {told[0]}")
    return found


@dataclass(frozen=True)
class _Reader:
    """Reader of the samples of one device; arguments as in ``read_samples``."""

    spec: DeviceSpec | None
    notes: list[str]
    host_work: Callable[[ExecutionGraph], HostWork] | None

    def singly(self, name: str, files: Sequence[str]) -> list[Samples]:
        """Return the samples of all readable files of a directory; notes list the others."""
        found: list[Samples] = []
        skipped = []
        for file in files:
            try:
                found += (read_table(Path(file), self.spec, self.notes) if is_table(file)
                          else self.trace(file, alone=False))
            except (ForetraceError, OSError) as error:
                skipped.append(f"{os.path.basename(file)} was skipped: {error}")
        if not found and skipped:
            raise DataError(f"Nothing in the directory {name} can be used; {skipped[0]}")
        self.notes.extend(skipped)
        return found

    def traces(self, name: str, *, alone: bool) -> list[Samples]:
        """Return the samples of one job's traces, or of several jobs in one directory, each read by itself. ``alone``:
        see ``trace``."""
        try:
            return self.trace(name, alone=alone)
        except JobError:
            if "://" in name or not os.path.isdir(name):
                raise
            files = [file.path for file in find_files([name], self.notes)]
            if len(files) < 2:
                raise
        return self.singly(name, files)

    def trace(self, name: str, *, alone: bool) -> list[Samples]:
        """Return the samples of a job; with ``alone`` a job without samples raises ``DataError``."""
        job = read_job([name])
        found = [one for one in read_job_samples(job, self.notes, self.spec, self.host_work) if len(one)]
        if not found and alone:
            raise DataError(f"{name} holds no kernel with recorded sizes on "
                            f"{self.spec.name if self.spec else 'a known device'} (its device: "
                            f"{', '.join(devices_of([job]))}); give a trace of that device, recorded with shapes, or a "
                            "table.")
        return found


def _campaign(tables: Sequence[Path]) -> list[Samples]:
    """Return the samples of all tables of a campaign; tables of families that are no single calls are skipped."""
    found, last = [], None
    for table in tables:
        try:
            found += read_table(table)
        except DataError as error:
            last = error
            if "holds no row" not in str(error):
                raise
    if not found and last is not None:
        raise last
    return found


__all__ = ["HELD_OUT_SHARE", "DataError", "HostWork", "Samples", "is_held_out", "joined", "read_samples"]
