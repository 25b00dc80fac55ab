"""Another batch size by two routes: do they give the same operations, and the same step time?

    python benchmarks/size_routes.py [--keep DIR] [--profile FILE] [--only NAME]

Each workload is captured on this CPU at two batch sizes, one thread each, in a process of its own. The larger one is
predicted from the smaller: by tracing the program again, and by scaling its capture; the larger one's own capture is
the truth, which neither route sees. Counted: operations of the traced step that do the work, and of those the ones
whose tensors have the same shapes by scaling. Step times hold under the profiler, like the captures'.

Others on a machine only ever make a step slower. So both sizes are captured in `ROUNDS` rounds, one after the other,
and of each the quickest of all profiled steps counts. A second table has the routes without a machine: the two sizes
traced by shapes for `MODELLED`, with its models' times for what would have been recorded. There is nothing but the
routes to differ.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foretrace.edits import Sizes
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.sizes.retrace import retrace
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from graph_predictor.synthesis.baseline import baseline_of
from graph_predictor.synthesis.recorded_operations import match, names_of_both, recorded_operations
from kernel_models.operation import Operation
from kernel_models.profile import load_profile
from tracer import workloads
from tracer.job import read_job
from tracer.shape_only import trace_workload

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "from foretrace.commands import main; main()"


@dataclass(frozen=True)
class Plan:
    """One workload: the captured batch, and the one predicted."""

    workload: str
    batches: tuple[int, int]
    fixed: dict[str, str] = field(default_factory=dict)


PLANS = (Plan("dlrm", (512, 1024)), Plan("llama", (4, 8)), Plan("resnet50", (16, 32), {"resolution": "32"}))
ROUNDS = 3
MODELLED = "h100-sxm"


@dataclass(frozen=True)
class Row:
    """Of one workload: operations and how many have equal shapes by scaling; step times by route, and of the capture at
    that size, ms."""

    workload: str
    operations: int
    by_scaling: int
    differing: tuple[str, ...]
    times_ms: tuple[float, float]
    measured_ms: float

    @property
    def apart(self) -> float:
        """Largest step time over the smallest, less one."""
        return max(self.times_ms) / min(self.times_ms) - 1


def capture(plan: Plan, batch: int, out: Path) -> None:
    """Capture one workload at one batch size, if it is not there yet."""
    if out.exists():
        return
    part = out.with_name(f"part of {out.name}")  # what a run that was stopped left is no capture
    shutil.rmtree(part, ignore_errors=True)
    settings = {**plan.fixed, "batch": str(batch)}
    sets = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    subprocess.run(
        [sys.executable, "-c", COMMAND, "capture", "--workload", plan.workload, *sets, "--warmup", "3", "--timed", "3",
         "--steps", "5", "--execution-trace", "none", "--form", "foretrace", "--out", str(part)],
        check=True, stdout=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    part.rename(out)


def captures(plan: Plan, folder: Path) -> list[Baseline]:
    """Of each batch size the quickest profiled step of all rounds."""
    places = {(batch, number): folder / f"{plan.workload}-{batch}-{'-'.join(plan.fixed.values())}-round{number}"
              for number in range(ROUNDS) for batch in plan.batches}
    for (batch, _), place in places.items():
        capture(plan, batch, place)
    found = []
    for batch in plan.batches:
        jobs = [read_job(places[batch, number]) for number in range(ROUNDS)]
        best = min(jobs, key=lambda job: int(job.graphs[0].steps.duration_ns.min()))
        found.append(baseline_of(best, int(np.argmin(best.graphs[0].steps.duration_ns))))
    return found


def modelled(plan: Plan) -> tuple[list[float], list[float]]:
    """GPU active and step times, ms, by tracing the new size and by scaling, of steps that models made up."""
    fixed = {name: int(value) for name, value in plan.fixed.items()}
    settings = [workloads.configure(plan.workload, **fixed, batch=batch) for batch in plan.batches]
    small, wanted = (baseline_of(trace_workload(one, MODELLED)) for one in settings)
    found = (wanted.predict(), small.predict([Sizes((("batch", *plan.batches),))]))
    return [one.gpu_active_us / 1e3 for one in found], [one.step_time_us / 1e3 for one in found]


def compare(plan: Plan, folder: Path, profile: str | None) -> Row:
    """Predict by both routes and count equal shapes."""
    small, wanted = plan.batches
    base, truth = captures(plan, folder)
    if profile is not None:
        fitted = load_profile(profile)
        base = base.with_models({fitted.device.name: fitted})
    traced = retrace(base, {"batch": wanted})
    scaled = Sizes((("batch", small, wanted),))
    times = (traced.predict(), base.predict([scaled]))

    graph = traced.built.graphs[0]
    known = recorded_operations(base.scenario, 0, names_of_both(graph))
    pairs = match(graph, known)
    rows = np.flatnonzero(pairs.own)
    sizes = ScaledShapes(base.scenario.built.graphs[0], scaled.changes)
    sizes.check()
    by_scaling = [sizes.operation_of(int(row)) for row in known.op[pairs.row[rows]]]
    differing = []
    for row, other in zip(rows.tolist(), by_scaling, strict=True):
        own = Operation.from_graph(graph, row)
        if shapes(other) != shapes(own):
            differing.append(f"{own.name} {shapes(own)} not {shapes(other)}")
    retraced, by_scale = (one.step_time_us / 1e3 for one in times)
    return Row(plan.workload, len(rows), len(rows) - len(differing), tuple(differing), (retraced, by_scale),
               truth.predict().step_time_us / 1e3)


def shapes(operation: Operation) -> list[object]:
    """Shapes of the tensors among an operation's arguments (not of lists, which profilers leave out when long)."""
    return [argument.shape for argument in operation.arguments
            if argument.shape and all(isinstance(size, int) for size in argument.shape)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", help="one workload")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep captures here, and use those that are there")
    parser.add_argument("--profile", metavar="FILE", help="fitted models of this CPU (foretrace calibrate)")
    options = parser.parse_args()
    print(f"{'workload':<10} {'batch':>12} {'operations':>10} {'= scaled':>9} {'retraced ms':>12} {'scaled ms':>9} "
          f"{'apart':>6} {'measured ms':>12}")
    with tempfile.TemporaryDirectory() as temporary:
        for plan in PLANS:
            if options.only not in (None, plan.workload):
                continue
            row = compare(plan, options.keep or Path(temporary), options.profile)
            small, wanted = plan.batches
            print(f"{row.workload:<10} {f'{small}→{wanted}':>12} {row.operations:>10,} {row.by_scaling:>9,} "
                  f"{row.times_ms[0]:>12.3f} {row.times_ms[1]:>9.3f} {row.apart:>6.1%} {row.measured_ms:>12.3f}")
            for text in dict.fromkeys(row.differing):
                print(f"    {text}")
    print(f"\n{f'modelled, {MODELLED}':<24} {'GPU active ms: traced, scaled':>30} {'apart':>7} "
          f"{'step ms: traced, scaled':>30} {'apart':>7}")
    for plan in PLANS:
        if options.only in (None, plan.workload):
            cells = [f"{', '.join(f'{time:.4f}' for time in times):>30} {max(times) / min(times) - 1:>7.2%}"
                     for times in modelled(plan)]
            print(f"{plan.workload:<24} {' '.join(cells)}")


if __name__ == "__main__":
    main()
