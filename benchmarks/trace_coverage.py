"""How much of the GPU time of recorded traces falls into a family of operations, and what does not.

    python benchmarks/trace_coverage.py [DATA]

DATA holds ``traces/`` (default: FORETRACE_DATA, or ../shared/data beside the checkout). Where an execution trace of the
same window lies beside a profiler trace, its shapes are taken over. Collectives are left out: other models price them.
"sized" is time whose sizes are known from shapes or a copy's bytes; coverage is the share of it in a family other than
``other``. "by name" is the rest, of which only names are known (traces without shapes, kernels of CUDA graphs), and the
share of it whose names tell a family. Times in ms. Exits with 1 if a trace is covered by less than 98%.
"""

from __future__ import annotations

import argparse
import gzip
import os
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernel_models.op_call import Family
from kernel_models.trace_calls import FAMILIES, Basis, TraceCalls, graph_calls
from tracer.execution_trace import is_execution_trace
from tracer.graph import ExecutionGraph
from tracer.join import join_execution_trace
from tracer.kineto import read_kineto

DATA = Path(os.environ.get("FORETRACE_DATA", Path(__file__).parents[2] / "shared" / "data"))
OTHER = FAMILIES.index(Family.OTHER)
LEAST = 0.98


@dataclass
class Coverage:
    """Nanoseconds of one trace."""

    total: int
    collective: int
    sized: int
    sized_known: int
    named: int
    named_known: int
    rest: Counter[str]
    """What falls into no family, by what it is called."""

    @property
    def share(self) -> float:
        """Share of the sized time that a family knows; 1 where nothing is sized."""
        return self.sized_known / self.sized if self.sized else 1.0


def coverage(graph: ExecutionGraph) -> Coverage:
    """Sort a graph's GPU time."""
    result = graph_calls(graph)
    by_name = result.basis == Basis.NAME
    known = result.family != OTHER
    time = result.time_ns
    return Coverage(
        total=int(graph.kernels.duration_ns.sum()), collective=result.collective_ns,
        sized=int(time[~by_name].sum()), sized_known=int(time[~by_name & known].sum()),
        named=int(time[by_name].sum()), named_known=int(time[by_name & known].sum()),
        rest=_rest(result, ~known),
    )


def _rest(result: TraceCalls, rows: np.ndarray) -> Counter[str]:
    rest: Counter[str] = Counter()
    for row in np.flatnonzero(rows).tolist():
        call = result.calls_of_row(row)[0]
        sizes = "no sizes" if result.basis[row] == Basis.NAME else "by bytes"
        rest[f"{call.kind} ({sizes})"] += int(result.time_ns[row])
    return rest


def profiler_traces(folder: Path) -> list[Path]:
    """Every profiler trace below a folder, execution traces left out."""
    return [path for path in sorted(folder.rglob("*.json*")) if not is_execution_trace(_text(path)[:65536])]


def read(path: Path) -> ExecutionGraph:
    """A profiler trace, with the shapes of the execution trace beside it ("a.kineto.json" and "a….et.json")."""
    graph = read_kineto(path)
    stem, kineto, _ = path.name.partition("kineto")
    beside = sorted(path.parent.glob(f"{stem}*et.json*")) if kineto else []
    for trace in beside:
        if is_execution_trace(_text(trace)[:65536]):
            join_execution_trace(graph, trace)
            break
    return graph


def _text(path: Path) -> bytes:
    stored = path.read_bytes()
    return gzip.decompress(stored) if stored[:2] == b"\x1f\x8b" else stored


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    folder = parser.parse_args().data / "traces"
    print(f"{'trace':<58} {'GPU ms':>9} {'coll.':>8} {'sized':>9} {'coverage':>9} {'by name':>9} {'of it':>7}")
    sums = np.zeros(6, np.int64)
    worst = 1.0
    for path in profiler_traces(folder):
        found = coverage(read(path))
        worst = min(worst, found.share)
        sums += (found.total, found.collective, found.sized, found.sized_known, found.named, found.named_known)
        name = str(path.relative_to(folder))
        _line(name if len(name) <= 58 else "…" + name[-57:], found.total, found.collective, found.sized,
              found.sized_known, found.named, found.named_known)
        for kind, time in found.rest.most_common():
            if time >= 0.0005 * (found.total - found.collective):
                print(f"    {time / 1e6:>9.3f} ms  {kind}")
    _line("all", *sums.tolist())
    return int(worst < LEAST)


def _line(name: str, total: int, collective: int, sized: int, known: int, named: int, named_known: int) -> None:
    share = f"{known / sized:>8.2%}" if sized else "       –"
    of_it = f"{named_known / named:>7.1%}" if named else "      –"
    print(f"{name:<58} {total / 1e6:>9.3f} {collective / 1e6:>8.3f} {sized / 1e6:>9.3f} {share:>9} "
          f"{named / 1e6:>9.3f} {of_it}")


if __name__ == "__main__":
    sys.exit(main())
