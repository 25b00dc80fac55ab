"""Measurements: tables of several known forms and traces, read into ``Samples`` of measured calls."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from kernel_models.datasets.samples import HELD_OUT_SHARE, DataError, Samples, is_held_out, joined
from kernel_models.datasets.tables import SUFFIXES, read_table

KERNELS = "kernels"
"""Folder of the tables in a campaign's directory."""


def read_samples(paths: Sequence[str], progress: Callable[[str], None] = lambda text: None) -> list[Samples]:
    """Samples of tables (Parquet, CSV), of campaigns' directories, and of anything ``tracer.read_job`` reads.

    Raises:
        DataError, TraceError: a path cannot be read, or nothing in it can be learned from.
    """
    found: list[Samples] = []
    for name in paths:
        path = Path(name)
        progress(f"reading {path.name}")
        if "://" not in name and path.is_dir() and (path / KERNELS).is_dir():
            tables = sorted((path / KERNELS).glob("*.parquet"))
            if not tables:
                raise DataError(f"{name} is a campaign without tables of micro-benchmarks; run its kernels first.")
            found += _campaign(tables)
        elif "://" not in name and name.endswith(SUFFIXES):
            if not os.path.exists(path):
                raise DataError(f"{name} does not exist; check the path.")
            found += read_table(path)
        else:
            found += _trace(name)
    return found


def _campaign(tables: Sequence[Path]) -> list[Samples]:
    """All tables of a campaign; those of families that are no single calls hold nothing and are passed over."""
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


def _trace(name: str) -> list[Samples]:
    from kernel_models.datasets.traces import devices_of, read_job_samples
    from tracer.job import read_job

    job = read_job([name])
    found = [one for one in read_job_samples(job) if len(one)]
    if not found:
        raise DataError(f"{name} holds no kernel with recorded sizes on a known device (its device: "
                        f"{', '.join(devices_of([job]))}); record with shapes, or name a table.")
    return found


__all__ = ["HELD_OUT_SHARE", "DataError", "Samples", "is_held_out", "joined", "read_samples"]
