"""Steps nobody ran, on this CPU: captured at two sizes, predicted at four others, then run.

    python benchmarks/predict_cpu.py [--only NAME,NAME] [--keep DIR] [--development]

Each workload of the suite is captured at two sizes. Four others, inside and outside the captured range, are predicted
from the nearer of the two captures (`foretrace.edits.Sizes`, without the profiler's cost) and compared with steps that
nothing watched. Every run is a process of its own, on one thread.

Others on a machine only ever make a step slower, by half on a shared core. So all sizes are run in `ROUNDS` rounds, one
after the other, and what a step takes is the median of the quickest fifth of all rounds' steps: of the captured sizes
too. Operations' times come from the round whose profiled steps were quickest.

`REPORTED` was written down before anything of it had been run. `DEVELOPMENT` holds other workloads at sizes of their
own: what `kernel_models/spreads.py` and `step_spread.py` say of spreads was chosen there.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from foretrace.edits import Sizes as Scaled
from graph_predictor.sizes.retrace import nearest
from graph_predictor.synthesis.baseline import baseline_of
from tracer.job import Job, read_job

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "from foretrace.commands import main; main()"
WARMUP, TIMED, STEPS = 5, 50, 5
ROUNDS, QUICKEST = 3, 0.2

Sizes = dict[str, int]


@dataclass(frozen=True)
class Plan:
    """One workload: settings that stay, the two captured sizes, the four that are predicted."""

    workload: str
    captured: tuple[Sizes, Sizes]
    unseen: tuple[Sizes, Sizes, Sizes, Sizes]
    fixed: dict[str, str] = field(default_factory=dict)


def _batches(*sizes: int) -> tuple[Sizes, ...]:
    return tuple({"batch": size} for size in sizes)


REPORTED = (
    Plan("dlrm", _batches(256, 1024), _batches(128, 384, 640, 1536)),  # type: ignore[arg-type]
    Plan("resnet50", _batches(2, 8), _batches(3, 4, 6, 12), {"resolution": "64"}),  # type: ignore[arg-type]
    Plan("bert", _batches(4, 12), _batches(3, 6, 8, 20)),  # type: ignore[arg-type]
    Plan("llama", ({"batch": 4, "seq": 64}, {"batch": 8, "seq": 192}),
         ({"batch": 2, "seq": 96}, {"batch": 6, "seq": 96}, {"batch": 4, "seq": 160}, {"batch": 8, "seq": 256})),
)
"""Chosen before looking; the first and the last of each lie outside the captured range, resnet50's last alone."""
DEVELOPMENT = (
    Plan("gpt2", ({"batch": 4, "seq": 48}, {"batch": 6, "seq": 160}),
         ({"batch": 3, "seq": 48}, {"batch": 4, "seq": 96}, {"batch": 6, "seq": 128}, {"batch": 10, "seq": 192})),
    Plan("vit", _batches(4, 16), _batches(3, 6, 10, 24)),  # type: ignore[arg-type]
    Plan("unet", _batches(2, 6), _batches(1, 3, 4, 9)),  # type: ignore[arg-type]
    Plan("lstm", _batches(4, 16), _batches(2, 7, 12, 28)),  # type: ignore[arg-type]
)


@dataclass(frozen=True)
class Case:
    """One prediction and its truth, ms; ``rounds`` are the least and the largest truth of a single round."""

    workload: str
    sizes: str
    predicted: float
    low: float
    high: float
    truth: float
    rounds: tuple[float, float]

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.truth - 1

    @property
    def covered(self) -> bool:
        """Whether the truth is in the 80% interval."""
        return self.low <= self.truth <= self.high


def run(plan: Plan, sizes: Sizes, out: Path) -> None:
    """Run one workload at one size in a process of its own: a captured size under ``capture``, any other alone."""
    if out.exists():
        return
    # What a run that was stopped left behind is not taken for a whole one.
    part = out.with_name(f"part of {out.name}")
    shutil.rmtree(part, ignore_errors=True)
    settings = [f"{name}={value}" for name, value in {**plan.fixed, **sizes}.items()]
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, __file__, "--time", plan.workload, *settings, "--out", str(part)]
    if sizes in plan.captured:
        command = [
            sys.executable, "-c", COMMAND, "capture", "--workload", plan.workload, *sets, "--warmup", str(WARMUP),
            "--timed", str(TIMED), "--steps", str(STEPS), "--execution-trace", "none", "--form", "foretrace",
            "--out", str(part)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL,
                   env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    part.rename(out)


def time_steps(workload: str, settings: list[str], out: Path) -> None:
    """Write what the iterations of a training loop take with nothing watching, ns."""
    from tracer import workloads

    training = workloads.create(workloads.parse(workload, settings))
    at = []
    for _, batch in zip(range(WARMUP + TIMED + 1), training.batches(), strict=False):
        at.append(time.perf_counter_ns())
        training.step(batch)
    out.write_text(json.dumps(np.diff(at)[WARMUP:].tolist()), encoding="utf-8")


def measure(plan: Plan, folder: Path) -> None:
    """Run every size of a plan in every round."""
    for number in range(ROUNDS):
        for sizes in (*plan.captured, *plan.unseen):
            run(plan, sizes, folder / _name(plan, sizes, number))


def quickest(*rounds: list[int]) -> list[int]:
    """The quickest steps of rounds that nothing watched, ns."""
    times = sorted(itertools.chain(*rounds))
    return times[:round(QUICKEST * len(times))]


def undisturbed(plan: Plan, sizes: Sizes, folder: Path) -> Job:
    """The capture with the quickest profiled steps, with the quickest unwatched steps of all rounds."""
    jobs = [read_job(folder / _name(plan, sizes, number)) for number in range(ROUNDS)]
    best = min(jobs, key=lambda job: float(np.median(job.graphs[0].steps.duration_ns)))
    best.graphs[0].meta.unprofiled_step_ns = quickest(
        *(job.graphs[0].meta.unprofiled_step_ns for job in jobs))
    return best


def cases(plan: Plan, folder: Path) -> list[Case]:
    """Predictions from the captured sizes, each with its truth."""
    measure(plan, folder)
    baselines = [baseline_of(undisturbed(plan, sizes, folder)) for sizes in plan.captured]
    found = []
    for sizes in plan.unseen:
        at = nearest(plan.captured, sizes)
        changes = tuple((name, plan.captured[at][name], size) for name, size in sizes.items()
                        if size != plan.captured[at][name])
        said = baselines[at].predict([Scaled(changes)])
        times = [json.loads((folder / _name(plan, sizes, number)).read_text()) for number in range(ROUNDS)]
        rounds = [float(np.median(quickest(one))) / 1e6 for one in times]
        truth = float(np.median(quickest(*times))) / 1e6
        found.append(Case(plan.workload, _label(sizes), said.step_time_us / 1e3, said.interval_us[0] / 1e3,
                          said.interval_us[1] / 1e3, truth, (min(rounds), max(rounds))))
    return found


def _label(sizes: Sizes) -> str:
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def _name(plan: Plan, sizes: Sizes, number: int) -> str:
    key = json.dumps([plan.fixed, sizes], sort_keys=True)
    return f"{plan.workload}-{_label(sizes)}-{zlib.crc32(key.encode()):08x}-round{number}"


def summary(label: str, found: list[Case]) -> str:
    """MAPE, bias, p90, max and coverage in one line."""
    error = np.array([case.error for case in found])
    covered = sum(case.covered for case in found)
    return (f"{label}: MAPE {np.abs(error).mean():.1%}, bias {error.mean():+.1%}, p90 "
            f"{np.quantile(np.abs(error), 0.9):.1%}, max {np.abs(error).max():.1%}; 80% intervals cover {covered} of "
            f"{len(found)} ({covered / len(found):.0%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,NAME", help="these workloads alone")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep captures here, and use those that are there")
    parser.add_argument("--development", action="store_true", help="the workloads spreads were chosen on")
    parser.add_argument("--time", nargs="+", metavar=("WORKLOAD", "SETTING"), help="time the steps of one alone")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where --time writes")
    options = parser.parse_args()
    if options.time:
        time_steps(options.time[0], options.time[1:], options.out)
        return
    plans = [plan for plan in (DEVELOPMENT if options.development else REPORTED)
             if options.only is None or plan.workload in options.only.split(",")]
    every: list[Case] = []
    print(f"{'workload':10}{'captured at':40}{'predicted':20}{'ms':>9}{'80% interval':>20}{'measured ms':>13}"
          f"{'by round':>20}{'error':>8}")
    with tempfile.TemporaryDirectory() as temporary:
        for plan in plans:
            found = cases(plan, options.keep or Path(temporary))
            for case in found:
                between = " and ".join(map(_label, plan.captured))
                print(f"{case.workload:10}{between:40}{case.sizes:20}{case.predicted:9.2f}"
                      f"{f'{case.low:.1f} to {case.high:.1f}':>20}{case.truth:13.2f}"
                      f"{f'{case.rounds[0]:.1f} to {case.rounds[1]:.1f}':>20}{case.error:+8.1%}"
                      f"{'' if case.covered else '  outside'}", flush=True)
            every += found
    print()
    for plan in plans:
        print(summary(plan.workload, [case for case in every if case.workload == plan.workload]))
    print(summary("all", every))


if __name__ == "__main__":
    main()
