"""What a sweep of 10,000 points over mixed axes costs, a thousand what-ifs, and a job of 1,024 folded ranks.

    python benchmarks/sweep_speed.py [DATA] [--points 10000] [--whatifs 1000] [--jobs 1] [--only resnet50-V100]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with `traces/`.
Operations are those of the repeated steps, which are simulated together: resnet50-V100 has 4,796 a step, and its last
three steps are alike. Costs are processor seconds of this process and the ones it starts: on a machine that does other
things too, they say more than the clock. A trace with sizes is also swept over batches, by scaling its capture.

What-ifs are predictions of one recording, each with other edits than all before it: a third of them another host, a
third other rates of the GPU, a third another device at other rates. Every result is compared, to the bit, with that of
a source that has predicted nothing else. The folded job is a workload of the suite under FSDP2, traced by shapes (which
needs PyTorch) and then predicted: both are shown.
"""

from __future__ import annotations

import argparse
import os
import resource
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from foretrace import edits
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.repeat import Shared
from graph_predictor.prediction.scenario import Edit
from graph_predictor.synthesis.baseline import baseline_of
from step_views.sweep import Axis, SweepSpace, sweep
from step_views.sweep.run import SweepSource

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
CASES = {"resnet50-V100": (), "resnet50-ddp-2xA100": (16, 64, 128, 256),
         "rank3-of-8xA100-6steps/rank3.kineto.json.gz": ()}
"""Steps of about 10,000 operations, and the batches that are swept where there are sizes (they were recorded at 32)."""
SWEEP_TARGET_S, WHATIF_TARGET_S, FOLDED_TARGET_S = 20, 6, 5
RANKS = 1024
DEVICES = ("b200", "h200-sxm", "a100-sxm-80g", "h100-sxm", "l40s")
BANDWIDTHS = (0.9, 1.0, 1.1, 1.2)


def space(points: int, batches: tuple[int, ...] = ()) -> SweepSpace:
    """So many combinations of devices, clocks, bandwidths, batches and hosts, all different."""
    clocks = 5 if batches else 10
    fixed = len(DEVICES) * clocks * len(BANDWIDTHS) * max(len(batches), 1)
    axes = [Axis("device", DEVICES), Axis("clock", factors(0.8, 1.2, clocks)), Axis("bandwidth", BANDWIDTHS),
            Axis("host", factors(0.5, 1.5, max(points // fixed, 1)))]
    return SweepSpace((*axes, Axis("set:batch", batches, 32)) if batches else tuple(axes))


def factors(low: float, high: float, count: int) -> tuple[float, ...]:
    """So many factors between two ends."""
    return tuple(np.linspace(low, high, count).round(4).tolist())


def processor_s() -> float:
    """Processor seconds of this process and of those it has waited for."""
    return sum(used.ru_utime + used.ru_stime for used in map(resource.getrusage, (
        resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def sweeping(trace: Path, points: int, batches: tuple[int, ...], jobs: int) -> None:
    """Sweep over one trace, reading and starting included."""
    wanted = space(points, batches)
    begin, spent = time.perf_counter(), processor_s()
    with tempfile.TemporaryDirectory() as folder:
        source, output = SweepSource((str(trace),)), Path(folder) / "t.parquet"
        found = sweep(source, wanted, output=output, jobs=jobs).table
    seconds, spent = time.perf_counter() - begin, processor_s() - spent
    over = ", ".join(axis.title for axis in wanted.axes)
    print(f"  {len(found):,} points over {over}, {jobs} processes: {spent:.1f} CPU-s "
          f"({1e3 * spent / len(found):.2f} ms a point; asked: {SWEEP_TARGET_S} s for 10,000), {seconds:.1f} s; "
          f"refused: {int(found['step_time_us'].isna().sum())}; steps of {found['step_time_us'].min() / 1e3:,.1f} to "
          f"{found['step_time_us'].max() / 1e3:,.1f} ms", flush=True)


def whatifs(count: int) -> list[list[Edit]]:
    """So many lists of edits, none twice."""
    random = np.random.default_rng(1)
    found: list[list[Edit]] = []
    for number in range(count):
        factor, other = random.uniform(0.6, 1.4, 2).tolist()
        found.append([[edits.ScaleHost(factor)], [edits.ScaleClock(factor), edits.ScaleBandwidth(other)],
                      [edits.Device(DEVICES[number % len(DEVICES)]), edits.ScaleClock(factor)]][number % 3])
    return found


def alone(start: Baseline) -> Baseline:
    """The same, with nothing that predictions share."""
    scenario = replace(start.scenario, cycle=replace(start.cycle), shared=Shared())
    return Baseline(scenario, start.spreads, start.notes, ran=start.ran, chosen=start.chosen)


def asking(start: Baseline, count: int) -> None:
    """Ask a thousand what-ifs of one recording, and each of them again by itself."""
    wanted = whatifs(count)
    alone(start).predict(wanted[0], path=False)
    spent = time.process_time()
    found = [start.predict(each, path=False) for each in wanted]
    spent = time.process_time() - spent
    unlike = sum(alone(start).predict(each, path=False) != result for each, result in zip(wanted, found, strict=True))
    print(f"  {count:,} what-ifs: {spent:.1f} CPU-s ({1e3 * spent / count:.2f} ms each; asked: {WHATIF_TARGET_S} s for "
          f"1,000); not equal to one at a time: {unlike}", flush=True)


def folded() -> None:
    """Trace and predict a job of many ranks that do the same."""
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
    """Print all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--points", type=int, default=10_000)
    parser.add_argument("--whatifs", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--only", default="", help="only traces with this in their names, and no folded job")
    options = parser.parse_args()
    for name, batches in CASES.items():
        if options.only not in name:
            continue
        trace = options.data / "traces" / name
        start = SweepSource((str(trace),)).study().prepared(SweepSpace(()).fixed).start
        cycle, graph = start.cycle, start.built.graphs[0]
        inside = np.isin(graph.ops.step, cycle.row[0])
        print(f"{name}: {int(inside.sum()):,} operations in {cycle.steps} steps", flush=True)
        asking(start, options.whatifs)
        sweeping(trace, options.points, (), options.jobs)
        if batches:
            sweeping(trace, options.points, batches, options.jobs)
    if not options.only:
        folded()


if __name__ == "__main__":
    main()
