"""Tracing the zoo: every program of the table once, each a small file in a cache."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import pandas as pd

from zoo_parts.ordered import Ordered
from zoo_parts.programs import Program, merges, trace
from zoo_parts.traced import Traced

LONGEST_S = 240
BY_HAND = ("112", "113")
"""Versions of PyTorch without fused attention."""
MERGED = ("291",)
"""Versions whose rows were measured with branches merged where inference can: such models take 0.2 to 0.7 of the time
they take with the version before on the same GPU, and no others do."""


def program_of(row: Any) -> Program:
    """The program of a row of the table."""
    return Program(row.kind, row.model, int(row.image), row.layout, row.torch not in BY_HAND, row.precision,
                   row.kind == "infer" and row.torch in MERGED)


def programs_of(table: pd.DataFrame) -> list[Program]:
    """What must be traced for the rows of a table, in an order that mixes families."""
    found: dict[str, Program] = {}
    for row in table.itertuples():
        program = program_of(row)
        found.setdefault(program.stem, program)
    return sorted(found.values(), key=lambda one: (hashlib.sha256(
        f"{one.architecture}{one.image}".encode()).hexdigest(), not one.fused, one.merged, one))


def same_operations(program: Program, cache: Path) -> Path | None:
    """The file of a program traced before that runs the same operations."""
    if program.kind != "infer":
        return None
    other = replace(program, fused=True, merged=False)
    path = cache / f"{other.stem}.json.gz"
    if other == program or not path.exists():
        return None
    if program.merged and merges(program):
        return None
    if not program.fused and any("attention" in row[0] for row in Traced.load(path).rows):
        return None
    return path


def trace_all(programs: list[Program], cache: Path, make: Callable[[Program], Traced | Ordered] = trace,
              same: Callable[[Program, Path], Path | None] = same_operations) -> None:
    """Trace those that were not traced yet, and say how each went.

    Args:
        programs: to be traced.
        cache: folder of a file for each.
        make: traces one.
        same: finds the file of a program traced before that runs the same operations.
    """
    cache.mkdir(parents=True, exist_ok=True)
    for number, program in enumerate(programs):
        said = _one(program, cache, make, same)
        if said:
            print(f"{number}/{len(programs)} {program.stem} {said}", flush=True)


def _one(program: Program, cache: Path, make: Callable[[Program], Traced | Ordered],
         same: Callable[[Program, Path], Path | None]) -> str:
    """Trace a program unless that was done; what to print."""
    target, failed = cache / f"{program.stem}.json.gz", cache / f"{program.stem}.error"
    if target.exists() or failed.exists():
        return ""
    begin = time.time()
    try:
        with limited(LONGEST_S):
            alike = same(program, cache)
            if alike is not None:
                os.link(alike, target)
                return f"as {alike.name}"
            found = make(program)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a model of a library may raise anything
        failed.write_text(f"{type(error).__name__}: {error}")
        return f"{type(error).__name__}: {str(error)[:300]}"
    found.save(target)
    return f"{found.operations} operations, {time.time() - begin:.1f} s"


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise ``TimeoutError`` when what is inside takes longer."""
    def over(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"not traced after {seconds} s")

    signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
