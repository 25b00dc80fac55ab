"""Digests of everything that foretrace makes of the recorded traces: the same before and after a change of speed.

    python benchmarks/same_results.py [DATA] --write before.json     # at the commit before
    python benchmarks/same_results.py [DATA] --against before.json   # at the commit after

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with `traces/`.
Every trace is read (its columns and strings), saved and loaded again, replayed (every simulated time), broken down,
predicted as it is and with edits, searched for opportunities and swept over; each job of several ranks also as one.
Digests are of the bits: a change of speed alone changes none. Exits with 1 and names what differs; where only names or
columns of a result do, beside a step time that is the same, it says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import foretrace
from foretrace import edits
from step_views.sweep import Axis, SweepSpace, sweep
from step_views.sweep.run import SweepSource
from tracer.errors import ForetraceError
from tracer.graph import ExecutionGraph
from tracer.job import Job
from tracer.store import load_graph, save_graph

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
EDITS = {
    "as it is": [],
    "device": [edits.Device("h200-sxm")],
    "clock and host": [edits.ScaleClock(1.2), edits.ScaleHost(0.5)],
    "device and host": [edits.Device("a100-sxm-80g"), edits.ScaleHost(0.8)],
}


def digest(value: Any) -> str:
    """A digest of arrays, data classes and plain values."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()[:16]


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        found.update(f"{value.dtype}{value.shape}".encode())
        found.update(np.ascontiguousarray(value).tobytes() if value.dtype != object else repr(value.tolist()).encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            found.update(field.name.encode())
            _feed(found, getattr(value, field.name))
    elif isinstance(value, dict):
        for key, part in value.items():
            found.update(repr(key).encode())
            _feed(found, part)
    elif isinstance(value, (list, tuple)):
        found.update(str(len(value)).encode())
        for part in value:
            _feed(found, part)
    else:
        found.update(repr(value).encode())


def _graph(graph: ExecutionGraph) -> list[Any]:
    fields = [getattr(graph, field.name) for field in dataclasses.fields(graph)]
    return [str(value).replace(str(DATA), "") if "Meta" in type(value).__name__ else value for value in fields]


def figure(value: Any) -> float | None:
    """The step time of a result, us; all steps' together of replays; ``None`` where it has none."""
    if isinstance(value, dict):
        return value.get("step_time_us")
    steps = value[0] if isinstance(value, list) and value else None
    times = [step.replayed_ns / 1e3 for step in steps or () if hasattr(step, "replayed_ns")] \
        if isinstance(steps, (list, tuple)) else []
    return sum(times) if times else None


def results(trace: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """What is made of one trace or job, each by its name."""
    job: list[Job] = []

    def read() -> Any:
        job.append(foretrace.read(str(trace)))
        return [_graph(graph) for graph in job[0].graphs]

    yield "read", read
    if not job:
        return
    graphs = job[0].graphs

    def stored() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            save_graph(graphs[0], Path(folder) / "g.foretrace")
            return _graph(load_graph(Path(folder) / "g.foretrace"))

    def replayed(profiled: bool) -> Any:
        found = foretrace.replay(job[0], profiled=profiled)
        return [found.steps, found.program, found.simulated, found.notes]

    def swept() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            space = SweepSpace((Axis("device", ("b200", "a100-sxm-80g")), Axis("clock", (0.8, 1.2)),
                                Axis("host", (0.5, 1.0))))
            return sweep(SweepSource((str(trace),)), space, output=Path(folder) / "t.parquet", jobs=1).table.to_csv()

    yield "stored", stored
    for profiled in (True, False):
        yield f"replayed, profiled={profiled}", lambda profiled=profiled: replayed(profiled)
        yield f"broken down, profiled={profiled}", (
            lambda profiled=profiled: foretrace.breakdown(foretrace.replay(job[0], profiled=profiled)).to_json())
    for name, chosen in EDITS.items():
        yield f"predicted, {name}", lambda chosen=chosen: foretrace.predict(job[0], chosen).to_json()
    yield "opportunities", lambda: foretrace.opportunities(job[0]).to_json()
    if len(graphs) == 1:
        yield "swept", swept


def sources(data: Path) -> Iterator[Path]:
    """Every trace, and every folder of several ranks."""
    traces = sorted((data / "traces").rglob("*.json.gz"))
    yield from traces
    yield from sorted({trace.parent for trace in traces if "rank" in trace.name
                       and len(list(trace.parent.glob("*kineto.json.gz"))) > 1})


def main() -> int:
    """Write the digests, or compare with those that were written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--write", type=Path, help="write the digests here")
    parser.add_argument("--against", type=Path, help="compare with the digests of this file")
    parser.add_argument("--only", default="", help="only sources with this in their path")
    options = parser.parse_args()
    found: dict[str, list[Any]] = {}
    for source in sources(options.data):
        name = str(source.relative_to(options.data / "traces"))
        if options.only not in name:
            continue
        for what, make in results(source):
            try:
                made = make()
                found[f"{name}: {what}"] = [digest(made), figure(made)]
            except ForetraceError as error:
                found[f"{name}: {what}"] = [f"refused: {digest(str(error).replace(str(options.data), ''))}", None]
    if options.write:
        options.write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    refused = sum(value[0].startswith("refused") for value in found.values())
    print(f"{len(found):,} results of {len(list(sources(options.data))):,} traces and jobs, {refused:,} refused")
    if not options.against:
        return 0
    before = json.loads(options.against.read_text(encoding="utf-8"))
    before = {name: value for name, value in before.items() if options.only in name.partition(": ")[0]}
    other = [name for name in {**before, **found} if before.get(name) != found.get(name)]
    moved = 0
    for name in other:
        old, new = (of.get(name, ["", None])[1] for of in (before, found))
        moved += not (old and old == new)
        print(f"differs: {name}" + (f" (step time {new / old - 1:+.4%})" if old and new else ""))
    print(f"{len(found) - len(set(other) & set(found)):,} equal to the bit, {len(other):,} differ, of which "
          f"{len(other) - moved:,} have the same step time")
    return 1 if other else 0


if __name__ == "__main__":
    sys.exit(main())
