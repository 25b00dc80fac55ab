"""Another batch size by three routes: do they give the same operations, and the same step time?

    python benchmarks/size_routes.py [--keep DIR] [--profile FILE] [--only NAME]

Each workload is captured on this CPU at two batch sizes (each capture in a process of its own, one thread), and a third
between them is predicted from the smaller capture: by tracing the program again, by laws through both captures, and by
scaling the smaller one alone. Counted: operations of the traced step that do the work, and of those the ones whose
tensors have the same shapes by each of the other routes. Step times hold under the profiler, like the captures'. Run it
on a quiet machine.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from graph_predictor.predict import Baseline
from graph_predictor.prediction.retraced_match import match, names_of_both
from graph_predictor.prediction.retraced_slots import slots_of
from graph_predictor.whatif import SizeLaws, Sizes
from graph_predictor.whatif.retrace import retrace
from kernel_models.operation import Operation
from kernel_models.profile import load_profile
from tracer.job import read_job

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "from graph_predictor.cli import main; main()"


@dataclass(frozen=True)
class Plan:
    """One workload: the smaller captured batch, the one predicted, the larger captured one."""

    workload: str
    batches: tuple[int, int, int]
    fixed: dict[str, str] = field(default_factory=dict)


PLANS = (Plan("dlrm", (512, 1024, 2048)), Plan("llama", (4, 8, 16)), Plan("resnet50", (4, 8, 16), {"resolution": "64"}))


@dataclass(frozen=True)
class Row:
    """Of one workload: operations and how many have equal shapes by laws and by scaling; step times by route, ms."""

    workload: str
    operations: int
    by_laws: int
    by_scaling: int
    differing: tuple[str, ...]
    times_ms: tuple[float, float, float]

    @property
    def apart(self) -> float:
        """Largest step time over the smallest, less one."""
        return max(self.times_ms) / min(self.times_ms) - 1


def capture(plan: Plan, batch: int, folder: Path) -> Path:
    """Capture one workload at one batch size, if it is not there yet."""
    out = folder / f"{plan.workload}-{batch}"
    if not out.exists():
        sets = [part for name, value in {**plan.fixed, "batch": str(batch)}.items()
                for part in ("--set", f"{name}={value}")]
        subprocess.run(
            [sys.executable, "-c", COMMAND, "capture", "--workload", plan.workload, *sets, "--warmup", "5", "--timed",
             "5", "--steps", "5", "--execution-trace", "none", "--form", "foretrace", "--out", str(out)],
            check=True, stdout=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    return out


def compare(plan: Plan, folder: Path, profile: str | None) -> Row:
    """Predict by the three routes and count equal shapes."""
    small, wanted, large = plan.batches
    bases = [Baseline(read_job(capture(plan, batch, folder))) for batch in (small, large)]
    if profile is not None:
        fitted = load_profile(profile)
        bases = [base.with_models({fitted.device.name: fitted}) for base in bases]
    base = bases[0]
    traced = retrace(base, {"batch": wanted})
    laws = SizeLaws(bases, [{"batch": small}, {"batch": large}], {"batch": wanted})
    scaled = Sizes((("batch", small, wanted),))
    times = (traced.predict(), base.predict([laws]), base.predict([scaled]))

    graph = traced.built.graphs[0]
    slots = slots_of(base.scenario, 0, names_of_both(graph))
    pairs = match(graph, slots)
    rows = np.flatnonzero(pairs.own)
    recorded = slots.op[pairs.slot[rows]]
    by_laws, by_scaling = laws.operations_of(recorded), scaled.operations_of(base.scenario, recorded)
    equal, differing = [0, 0], []
    for row, *others in zip(rows.tolist(), by_laws, by_scaling, strict=True):
        truth = Operation.from_graph(graph, row)
        for route, (name, other) in enumerate(zip(("laws", "scaling"), others, strict=True)):
            same = shapes(other) == shapes(truth)
            equal[route] += same
            if not same:
                differing.append(f"{name}: {truth.name} {shapes(truth)} not {shapes(other)}")
    retraced, by_law, by_scale = (one.step_time_us / 1e3 for one in times)
    return Row(plan.workload, len(rows), equal[0], equal[1], tuple(differing), (retraced, by_law, by_scale))


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
    print(f"{'workload':<10} {'batch':>12} {'operations':>10} {'= by laws':>10} {'= scaled':>9} {'retraced ms':>12} "
          f"{'laws ms':>9} {'scaled ms':>9} {'apart':>6}")
    with tempfile.TemporaryDirectory() as temporary:
        for plan in PLANS:
            if options.only not in (None, plan.workload):
                continue
            row = compare(plan, options.keep or Path(temporary), options.profile)
            small, wanted, large = plan.batches
            print(f"{row.workload:<10} {f'{small},{large}→{wanted}':>12} {row.operations:>10,} {row.by_laws:>10,} "
                  f"{row.by_scaling:>9,} {row.times_ms[0]:>12.3f} {row.times_ms[1]:>9.3f} {row.times_ms[2]:>9.3f} "
                  f"{row.apart:>6.1%}")
            for text in dict.fromkeys(row.differing):
                print(f"    {text}")


if __name__ == "__main__":
    main()
