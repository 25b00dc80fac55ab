"""Output of the OSU micro-benchmarks of MPI libraries (``osu_allreduce`` and its siblings) and of ``ucc_perftest``.

::

    # OSU MPI Allreduce Latency Test v7.3              Collective:             Allreduce
    # Datatype: MPI_FLOAT.                             Datatype:               float32
    # Size       Avg Latency(us)                              Count        Size                Time, us
    4                       1.95                                                            avg         min       max
    8                       1.97                                1           4             17.97       17.29     18.99

Neither says how many ranks there were; OSU's test of two ranks needs no word. The mean over ranks is taken. A *size* is
what a rank sends to each other one in an all-to-all, and what it brings to an all-gather (both programs): the payload
is that times the ranks.
"""

from __future__ import annotations

import math
import re

from kernel_models.collectives.call import CollectiveKind, CommError, Placement, collective_kind, dtype_name
from kernel_models.collectives.measurements import CollectiveMeasurements, make_measurements
from kernel_models.collectives.readers.hints import Hints

_OSU = re.compile(r"^#\s*OSU MPI(?:-CUDA|-ROCM)?\s+(?:Non-blocking\s+)?([\w-]+)\s+Latency Test", re.MULTILINE)
_OSU_PAIR = re.compile(r"^#\s*OSU MPI\S*\s+Latency Test", re.MULTILINE)
_OSU_SIZE = re.compile(r"^#\s*Size\s+(?:Avg )?Latency\s*\(us\)", re.MULTILINE)
_OSU_TYPE = re.compile(r"^#\s*Datatype:\s*MPI_(\w+?)\.?\s*$", re.MULTILINE)
_UCC = re.compile(r"^Collective:\s*(\w+)", re.MULTILINE)
_UCC_SIZE = re.compile(r"^\s*Count\s+Size\s+Time, us", re.MULTILINE)
_UCC_TYPE = re.compile(r"^Datatype:\s*(\w+)", re.MULTILINE)
_EACH = (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL)
"""Kinds whose *size* is of one pair of ranks, or of what one rank brings."""


def is_mpi(text: str) -> bool:
    """Return whether a text looks like the output of either program."""
    return any(name.search(text) and size.search(text) for name, size in (
        (_OSU, _OSU_SIZE), (_OSU_PAIR, _OSU_SIZE), (_UCC, _UCC_SIZE)))


def read_mpi(text: str, name: str, hints: Hints) -> CollectiveMeasurements:
    """Return the measurements of an output.

    Raises:
        CommError: a line is broken, the collective is none foretrace knows, or nothing says how many ranks there were.
    """
    osu = _OSU_SIZE.search(text)
    head = osu or _UCC_SIZE.search(text)
    assert head is not None
    kind = hints.kind or _kind(text, name)
    if hints.ranks is None and kind is not CollectiveKind.SEND_RECV:
        raise CommError(f"{name} does not say how many ranks there were; give --ranks (and --per-node).")
    placement = hints.placement() if hints.ranks is not None else Placement((1, 1))
    typed = (_OSU_TYPE if osu else _UCC_TYPE).search(text)
    dtype = dtype_name(typed[1]) if typed else hints.dtype
    column, size_column = (1, 0) if osu else (2, 1)
    rows = []
    first = text.count("\n", 0, head.start()) + 1
    for number, line in enumerate(text.splitlines()[first:], start=first + 1):
        cells = line.split()
        if not cells or not cells[0].isdecimal():
            continue
        try:
            size, time_us = float(cells[size_column]), float(cells[column])
            if not (0 <= size < math.inf and 0 < time_us < math.inf):
                raise ValueError
        except (ValueError, IndexError):
            raise CommError(f"{name}, line {number}: the row is cut off or another tool's ({line.strip()[:40]!r}); "
                            "remove it, or give the whole output.") from None
        rows.append((kind, dtype, placement, size * (placement.ranks if kind in _EACH else 1), time_us))
    if not rows:
        raise CommError(f"{name}: there is no row of results in it; give the whole output.")
    return make_measurements(rows, hints.backend)


def _kind(text: str, name: str) -> CollectiveKind:
    found = _OSU.search(text) or _UCC.search(text)
    if found is None:
        return CollectiveKind.SEND_RECV
    try:
        return collective_kind(found[1].lower().replace("-", "_"))
    except CommError as error:
        raise CommError(f"{name}: {error}") from None
