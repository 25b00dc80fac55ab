"""Capture every workload of the suite on this machine, read it back, replay it; one table.

Run: ``python benchmarks/capture_suite.py [--preset tiny] [--keep DIR]``; needs PyTorch (``pip install .[capture]``).

Columns: seconds for the whole capture (its own process, PyTorch's import and first steps included); the median step
nobody watched; the median profiled step and its slow-down; the replay's worst error; the share of operations joined
to the execution trace; the capture's size.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tracer
from graph_predictor import replay
from tracer import workloads

ROOT = Path(__file__).resolve().parents[1]


def capture(name: str, preset: str, out: Path) -> float:
    """Capture one workload in a process of its own; returns the seconds it took."""
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", "from foretrace.commands import main; main()", "capture", "--workload", name,
         "--preset", preset, "--out", str(out)],
        check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--keep", type=Path, help="keep the captures in this directory")
    options = parser.parse_args()
    print(f"{'workload':10} {'capture s':>9} {'unprofiled ms':>13} {'profiled ms':>11} {'slow-down':>9} "
          f"{'replay error':>12} {'joined':>7} {'kB':>6}")
    with tempfile.TemporaryDirectory() as temporary:
        base = options.keep or Path(temporary)
        for name in workloads.names():
            seconds = capture(name, options.preset, base / name)
            job = tracer.read_job(base / name)
            meta = job.graphs[0].meta
            result = replay(job.graphs)
            truth = statistics.median(meta.unprofiled_step_ns) / 1e6
            profiled = statistics.median(step.measured_ns for step in result.steps) / 1e6
            size = sum(file.stat().st_size for file in (base / name).rglob("*") if file.is_file()) / 1e3
            print(f"{name:10} {seconds:9.1f} {truth:13.3f} {profiled:11.3f} {profiled / truth:8.2f}x "
                  f"{result.max_abs_error:11.3%} {meta.et_joined / max(meta.et_candidates, 1):7.1%} {size:6.0f}")


if __name__ == "__main__":
    main()
