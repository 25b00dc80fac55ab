"""How well replays close and what-ifs behave on real traces, as one table.

    python benchmarks/replay_accuracy.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with `traces/`,
published by the public projects HolisticTraceAnalysis, PARAM, TraceLens and Kineto (their sample and test traces).
Everything is simulated in constants mode: waiting is no stored duration, launch latencies and kernel gaps are a few
constants per trace. Errors of steps are replayed over measured, less one; kernel ends count as shares of a median step.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import numpy as np
from delayed_rank import delay_rank
from leave_one_out import leave_one_out

from graph_predictor.prediction.replay import Replay, replay
from graph_predictor.simulation.build import Built, build_program
from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.program import Program, Simulated, step_items
from tracer.errors import ForetraceError
from tracer.job import read_job

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
JOBS = ("dlrm-8xV100-2023", "nanogpt-8xH100")
"""Folders whose traces are the ranks of one job; elsewhere a file is a job."""


def jobs(traces: Path) -> list[str]:
    """Every trace that can be replayed, relative to the folder; the ranks of one job as their folder."""
    found = []
    for path in sorted(traces.glob("**/*.json.gz")):
        name = str(path.relative_to(traces))
        if ".et." not in path.name and path.name != "et.json.gz" and path.parent.name not in JOBS:
            found.append(name)
    return sorted([*found, *(job for job in JOBS if (traces / job).is_dir())])


def build(traces: Path, name: str) -> Built:
    """Read a job and build its program."""
    return build_program(read_job(traces / name).graphs)


def closure(result: Replay) -> str:
    """One row of the first table."""
    errors = np.abs(result.kernel_end_errors_ns())
    step = float(np.median([s.measured_ns for s in result.steps]))
    ends = float(np.percentile(errors, 95)) / step if len(errors) else 0.0
    remark = "" if result.reproducible else "  not reproducible"
    return (f"{len(result.steps):6}{step / 1e6:10.2f}{result.median_abs_error:9.3%}{result.max_abs_error:9.3%}"
            f"{ends:9.3%}{result.unexplained_share:9.3%}{remark}")


def steps_ms(program: Program, simulated: Simulated) -> list[float]:
    """Simulated time of every step, ms."""
    return [float(simulated.item_end[end] - simulated.item_end[begin]) / 1e6
            for _, _, begin, end in step_items(program)]


def shown(values: list[float]) -> str:
    return " ".join(f"{value:.1f}" for value in values)


def v100(built: Built) -> list[tuple[str, str, str]]:
    """What-ifs of the GPU-bound ResNet-50."""
    scaled = {factor: [s.replayed_ns / 1e6 for s in replay(built.graphs, built=built, scale_kernels=factor).steps]
              for factor in (0.25, 0.5, 1, 2)}
    kernels = built.graphs[0].kernels
    mine = np.nonzero((kernels.step == 0) & (kernels.launch >= 0))[0]
    durations = built.program.kernel_duration.copy()
    durations[mine[len(mine) // 2]] += 20_000_000
    longer = built.program.with_durations(durations)
    grown = steps_ms(longer, simulate(longer))[1] - scaled[1][1]
    return [("ResNet-50 V100, kernels x 0.5", f"steps 4-5: {shown(scaled[0.5][3:])} ms", "47.5-49.5"),
            ("ResNet-50 V100, kernels x 0.25", f"steps 2-5: {shown(scaled[0.25][1:])} ms", "30-34"),
            ("ResNet-50 V100, kernels x 2", f"steps 3-5: {shown(scaled[2][2:])} ms", "188-192"),
            ("ResNet-50 V100, one kernel of step 1 + 20 ms", f"step 2: + {grown:.3f} ms", "20 +- 0.5")]


def ddp(built: Built) -> list[tuple[str, str, str]]:
    """What-ifs of the host-bound DDP ResNet-50."""
    measured = np.array([s.measured_ns for s in replay(built.graphs, built=built).steps])
    changes = [np.abs(np.array([s.replayed_ns for s in replay(built.graphs, built=built, scale_kernels=f).steps])
                      / measured - 1).max() for f in (0.1, 0.5, 2)]
    return [("ResNet-50 DDP 2xA100, kernels x 0.1, 0.5, 2", " ".join(f"{c:.4%}" for c in changes), "<= 0.1%")]


def rank3(built: Built) -> list[tuple[str, str, str]]:
    """What-ifs of one rank of eight; its collectives keep their recorded durations."""
    rows = []
    for factor, target in ((0.25, "69-73"), (2, "108-116")):
        mean = np.mean([s.replayed_ns for s in replay(built.graphs, built=built, scale_kernels=factor).steps]) / 1e6
        rows.append((f"rank 3 of 8xA100, kernels x {factor}", f"mean step {mean:.2f} ms", target))
    return rows


def dlrm(built: Built) -> list[tuple[str, str, str]]:
    """Delays of one rank of eight, with collectives as rendezvous."""
    grouped = built.program.kernel_group >= 0
    before = simulate(built.program).kernel_end[grouped]
    off = np.abs(before - built.program.recorded_kernel_end[grouped]).max() / 1e3
    rows = [("DLRM 8xV100, collective ends", f"largest error {off:.1f} us", "<= 0.5% of a step")]
    for rank, milliseconds, target in ((7, 5, "5,000"), (7, -5, "505 +- 60"), (1, 10, "2,376 +- 80"), (1, -5, "0")):
        moved = (simulate(delay_rank(built.program, rank, milliseconds * 1_000_000)).kernel_end[grouped] - before) / 1e3
        rows.append((f"DLRM 8xV100, rank {rank} {milliseconds:+} ms",
                     f"ends move {np.abs(moved).min():,.1f}-{np.abs(moved).max():,.1f} us", target))
    return rows


def left_out(label: str, target: str, built: Built) -> list[tuple[str, str, str]]:
    """Every kernel's duration from the other steps."""
    out = leave_one_out(built)
    simulated = simulate(out.program)
    measured = [float(out.program.recorded_item_end[e] - out.program.recorded_item_end[b]) / 1e6
                for _, _, b, e in step_items(out.program)]
    errors = [ours / theirs - 1 for ours, theirs in zip(steps_ms(out.program, simulated), measured, strict=True)]
    return [(f"leave one step out, {label}",
             f"max |error| {max(map(abs, errors)):.3%}, {out.matched_share:.2%} of kernels matched", target)]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    traces = parser.parse_args().data / "traces"
    if not traces.is_dir():
        print(f"{traces} does not exist; name the folder that holds traces/, or set FORETRACE_DATA.", file=sys.stderr)
        return 2
    built: dict[str, Built] = {}
    print(f"{'closure, constants mode':74}{'steps':>6}{'step ms':>10}{'median':>9}{'max':>9}{'p95 end':>9}"
          f"{'unexpl.':>9}")
    errors = []
    for name in jobs(traces):
        try:
            built[name] = build(traces, name)
            result = replay(built[name].graphs, built=built[name])
            errors += [abs(step.error) for step in result.steps]
            print(f"{name:74}{closure(result)}")
        except ForetraceError as error:
            print(f"{name:74}  {error}")
    print(f"{'all steps':74}{len(errors):6}{'':10}{np.median(errors):9.3%}{max(errors):9.3%}")
    resnet, eighth = "resnet50-V100/rank0.kineto.json.gz", "rank3-of-8xA100-6steps/rank3.kineto.json.gz"
    tables = (("dlrm-8xV100-2023", dlrm), (resnet, v100), ("resnet50-ddp-2xA100/rank0.kineto.json.gz", ddp),
              (eighth, rank3), (resnet, lambda b: left_out("V100", "<= 0.5%", b)),
              (eighth, lambda b: left_out("rank 3 of 8", "<= 3%", b)))
    print(f"\n{'what-if':48}{'simulated':52}target")
    for name, table in tables:
        for label, value, target in table(built[name]) if name in built else []:
            print(f"{label:48}{value:52}{target}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
