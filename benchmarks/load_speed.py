"""Size and load time of saved graphs against the gzipped JSON traces they came from.

    python benchmarks/load_speed.py [TRACE ...]

Without arguments: every profiler trace under FORETRACE_DATA (default: ../shared/data beside the checkout). JSON time
is ``json.loads`` of the text already unpacked and in memory; load time is ``load_graph`` from the file. Best of N.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tracer.execution_trace import is_execution_trace
from tracer.kineto import read_kineto
from tracer.store import load_graph, save_graph

DATA = Path(os.environ.get("FORETRACE_DATA", Path(__file__).parents[2] / "shared" / "data"))


def best(function: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of ``repeats`` runs."""
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def measure(trace: Path, folder: Path, repeats: int) -> tuple[int, int, float, float] | None:
    """Bytes of the trace and of the saved graph, seconds to parse and to load; ``None`` for execution traces."""
    stored = trace.read_bytes()
    text = gzip.decompress(stored) if stored[:2] == b"\x1f\x8b" else stored
    if is_execution_trace(text[:65536]):
        return None
    saved = folder / "graph.foretrace"
    save_graph(read_kineto(trace), saved)
    parse = best(lambda: json.loads(text), repeats)
    load = best(lambda: load_graph(saved), repeats)
    return len(stored), saved.stat().st_size, parse, load


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="*", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    traces = options.traces or sorted((DATA / "traces").rglob("*.json.gz"))
    print(f"{'trace':<50} {'json.gz':>10} {'foretrace':>10} {'ratio':>6} {'parse ms':>9} {'load ms':>8} {'faster':>7}")
    with tempfile.TemporaryDirectory() as folder:
        for trace in traces:
            result = measure(trace, Path(folder), options.repeats)
            if result is None:
                continue
            stored, saved, parse, load = result
            name = "/".join(trace.parts[-2:])
            name = name if len(name) <= 50 else "…" + name[-49:]
            print(f"{name:<50} {stored:>10,} {saved:>10,} {saved / stored:>6.2f} {parse * 1e3:>9.1f} "
                  f"{load * 1e3:>8.2f} {parse / load:>6.1f}x")


if __name__ == "__main__":
    main()
