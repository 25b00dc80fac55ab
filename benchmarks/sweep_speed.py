"""What a sweep costs: a thousand points of 7,000, 14,000 and 19,000 operations, and a job of 1,024 folded ranks.

    python benchmarks/sweep_speed.py [DATA] [--points 1000] [--jobs 2]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with `traces/`.
The points are combinations of devices, clocks and host factors of one recording. Operations are those of the repeated
steps, which are simulated together: resnet50-V100 has 4,796 a step, and its last four steps are alike. Processor time
of a point is measured apart, in one process over some of the points: on a machine that does other things too, it says
more than the clock. The folded job
is a workload of the suite under FSDP2, traced by shapes (which needs PyTorch) and then predicted: both are shown.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path

import numpy as np

from graph_predictor.sweep import Axis, SweepSpace, sweep
from graph_predictor.sweep.rows import row
from graph_predictor.sweep.run import SweepSource
from graph_predictor.synthesis.baseline import baseline_of

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
CASES = ("rank3-of-8xA100-6steps/rank3.kineto.json.gz", "resnet50-ddp-2xA100", "resnet50-V100")
"""A step of fewer than 10,000 operations, and steps of more."""
SAMPLE = 32
"""Neighbouring points whose processor time is measured: two chunks of a worker."""
SWEEP_TARGET_S, FOLDED_TARGET_S = 60, 5
RANKS = 1024
DEVICES = ("b200", "h200-sxm", "a100-sxm-80g", "h100-sxm", "l40s")


def space(points: int) -> SweepSpace:
    """So many combinations, all different."""
    rest = -(-points // len(DEVICES))
    clocks = tuple(float(value) for value in np.linspace(0.8, 1.2, 10).round(4))
    hosts = tuple(float(value) for value in np.linspace(0.5, 1.5, -(-rest // len(clocks))).round(4))
    return SweepSpace((Axis("device", DEVICES), Axis("clock", clocks), Axis("host", hosts)))


def sweeping(trace: Path, points: int, jobs: int) -> None:
    source = SweepSource((str(trace),))
    study = source.study()
    start = study.prepared(space(1).fixed).start
    steps = np.unique(start.built.graphs[0].ops.step)[-start.cycle.steps:]
    ops = int(np.isin(start.built.graphs[0].ops.step, steps).sum())
    wanted = space(points)
    some = list(wanted)[len(wanted) // 3:][:SAMPLE]
    row(study, some[0], None)
    spent = time.process_time()
    for point in some:
        row(study, point, None)
    spent = (time.process_time() - spent) / len(some)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        found = sweep(source, wanted, output=Path(folder) / "t.parquet", jobs=jobs)
        seconds = time.perf_counter() - begin
    print(f"{len(found.table):,} points of {ops:,} operations, {jobs} processes, reading and starting included: "
          f"{seconds:.1f} s ({1e3 * seconds / len(found.table):.0f} ms a point; asked: {SWEEP_TARGET_S} s for 1,000); "
          f"processor time {1e3 * spent:.0f} ms a point in one process")
    print(f"refused: {int(found.table['step_time_us'].isna().sum())}; step times from "
          f"{found.table['step_time_us'].min() / 1e3:,.1f} to {found.table['step_time_us'].max() / 1e3:,.1f} ms")


def folded() -> None:
    from tracer import workloads
    from tracer.shape_only import trace_job

    settings = workloads.configure("llama")
    begin = time.perf_counter()
    job = trace_job(settings, "h200-sxm", world_size=RANKS, parallel=f"fsdp2={RANKS}")
    traced = time.perf_counter()
    result = baseline_of(job).predict()
    done = time.perf_counter()
    print(f"{RANKS:,} folded ranks ({len(job.graphs)} graphs): traced in {traced - begin:.2f} s, predicted in "
          f"{done - traced:.2f} s ({result.step_time_us / 1e3:.2f} ms a step; asked: {FOLDED_TARGET_S} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    for name in CASES:
        sweeping(options.data / "traces" / name, options.points, options.jobs)
    folded()


if __name__ == "__main__":
    main()
