"""How often 80% intervals of step times hold, and what their constants rest on.

    python benchmarks/interval_coverage.py [DATA] [--cpu DIR] [--development DIR]

DATA is a folder with `traces/` and `kernels/`; DIR is what `predict_cpu.py --keep DIR` and `--development --keep DIR`
left (without them the CPU's cases are left out).

1. *What the constants rest on*, no case of the second part. `SHARED_VARIANCE` (`prediction/pricing.py`): calls
   of published kernel tables that were measured on two devices, priced from data sheets; how much of the error's
   variance the two have in common. `USUAL_STEPS` (`kernel_models/spreads.py`): pairs of steps of the
   traces after their first two whole ones, and of the development captures, against the steps that follow them.
2. *Coverage* of every held-out prediction: steps 1–2 of each trace against the mean of those that follow, traces on
   another trace's device and host, and the reported sizes of `predict_cpu.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fitted_times import Fitted
from kernel_tables import table_sets
from predict_cpu import DEVELOPMENT, REPORTED, Plan, cases
from predict_traces import DATA, FIT, LATER, PAIRS, first_whole_step

from foretrace.edits import Device, HostFrom
from graph_predictor.prediction.overheads import recorded_overheads
from graph_predictor.prediction.step_spread import mean_spread
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.op_call import OpCall
from kernel_models.pricing import price
from tracer.graph import ExecutionGraph
from tracer.job import read_job

NEXT = 4
"""Steps after a pair that it is compared with."""
LEAST_COMMON = 30
"""Calls that two devices must share to be compared."""


@dataclass(frozen=True)
class Held:
    """One held-out prediction, µs or any one unit."""

    name: str
    predicted: float
    interval: tuple[float, float]
    truth: float

    @property
    def inside(self) -> bool:
        """Whether the interval holds the truth."""
        return self.interval[0] <= self.truth <= self.interval[1]


def shared_variance(data: Path) -> None:
    """Print the share of the data-sheet error's variance that two devices have in common, by table and family."""
    errors: dict[str, list[tuple[str, dict[OpCall, float]]]] = {}
    for found in table_sets(data):
        times = price(found.calls, found.device).times_us
        logs: dict[OpCall, list[float]] = {}
        for call, measured, said in zip(found.calls, found.measured_us, times, strict=True):
            logs.setdefault(call, []).append(float(np.log(measured / said)))
        errors.setdefault(found.table, []).append(
            (found.device.name, {call: float(np.median(each)) for call, each in logs.items()}))
    print(f"{'table':22}{'family':14}{'pairs':>6}{'calls':>8}{'rms error':>11}{'rms of ratio':>14}{'shared':>8}")
    weights = []
    for table, devices in errors.items():
        rows: dict[str, list[tuple[int, float, float]]] = {}
        for (_, one), (_, other) in itertools.combinations(devices, 2):
            common: dict[str, list[tuple[float, float]]] = {}
            for call in [call for call in one if call in other]:
                common.setdefault(call.family.value, []).append((one[call], other[call]))
            for family, pairs in common.items():
                if len(pairs) >= LEAST_COMMON:
                    a, b = np.array(pairs).T
                    rows.setdefault(family, []).append(
                        (len(pairs), float((a**2 + b**2).mean()), float(((a - b) ** 2).mean())))
        for family, found_rows in rows.items():
            count, both, ratio = (np.array(column) for column in zip(*found_rows, strict=True))
            shared = 1 - ratio.mean() / both.mean()
            weights.append((len(found_rows), shared))
            print(f"{table:22}{family:14}{len(count):6}{count.sum():8,}{np.sqrt(both.mean() / 2):11.2f}"
                  f"{np.sqrt(ratio.mean()):14.2f}{shared:8.2f}")
    pairs_of, shares = np.array(weights).T
    print(f"mean over pairs of devices: {np.average(shares, weights=pairs_of):.2f}; median over rows "
          f"{np.median(shares):.2f}\n")


def host_windows(series: dict[str, np.ndarray], label: str) -> None:
    """Print how often the spread of pairs of steps' host time holds the mean of the steps that follow."""
    held: dict[str, list[bool]] = {}
    for name, times in series.items():
        for at in range(len(times) - FIT - 1):
            pair, after = times[at:at + FIT], times[at + FIT:at + FIT + NEXT]
            half = mean_spread(pair)
            held.setdefault(name, []).append(abs(float(np.log(after.mean() / pair.mean()))) <= half)
    shares = [float(np.mean(each)) for each in held.values()]
    count = sum(map(len, held.values()))
    print(f"{label}: {count} pairs of steps in {len(held)} runs; inside {np.mean(shares):.0%} (mean of runs)")


def host_totals(graph: ExecutionGraph) -> np.ndarray:
    """Host time of every step, ns."""
    segments = recorded_overheads(graph, profiled=True)[0].segments
    inside = segments.step >= 0
    return np.bincount(segments.step[inside], weights=segments.duration_ns[inside], minlength=len(graph.steps))


def later_steps(traces: Path) -> list[Held]:
    """The mean of all steps after the first two whole ones."""
    found = []
    for name in LATER:
        job = read_job(traces / name)
        begin = first_whole_step(job.graphs[0])
        said = baseline_of(job, range(begin, begin + FIT)).predict([Fitted()])
        truth = float(job.graphs[0].steps.duration_ns[begin + FIT:].mean()) / 1e3
        found.append(Held(f"{name}, the steps after 1–2", said.step_time_us, said.interval_us, truth))
    return found


def device_pairs(traces: Path) -> list[Held]:
    """Each trace of a pair on the other's device, with the other's host."""
    found = []
    for first, second, name in PAIRS:
        jobs = read_job(traces / first), read_job(traces / second)
        for source, target, label in ((0, 1, name), (1, 0, f"{name}, back")):
            measured = baseline_of(jobs[target])
            spec = measured.scenario.devices.source
            assert spec is not None
            said = baseline_of(jobs[source]).predict([Device(spec), HostFrom(jobs[target].graphs, "the other")])
            found.append(Held(label, said.step_time_us, said.interval_us, measured.predict().step_time_us))
    return found


def cpu_sizes(plans: tuple[Plan, ...], folder: Path) -> list[Held]:
    """Sizes of the workloads whose captures are in a folder."""
    return [Held(f"{case.workload} {case.sizes}", 1e3 * case.predicted, (1e3 * case.low, 1e3 * case.high),
                 1e3 * case.truth) for plan in plans for case in cases(plan, folder)]


def unwatched(folder: Path) -> dict[str, np.ndarray]:
    """Steps that nothing watched, of every run in a folder."""
    return {path.name: np.array(json.loads(path.read_text()), float) for path in sorted(folder.iterdir())
            if path.is_file()}


def show(label: str, found: list[Held]) -> None:
    """Print every case and the share that is inside."""
    print(f"\n{label:64}{'predicted ms':>14}{'80% interval':>20}{'measured':>10}")
    for one in found:
        interval = f"{one.interval[0] / 1e3:.2f} to {one.interval[1] / 1e3:.2f}"
        print(f"{one.name:64}{one.predicted / 1e3:14.2f}{interval:>20}{one.truth / 1e3:10.2f}"
              f"{'' if one.inside else '  outside'}")
    print(f"inside: {sum(one.inside for one in found)} of {len(found)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--cpu", type=Path, metavar="DIR", help="captures of predict_cpu.py's reported workloads")
    parser.add_argument("--development", type=Path, metavar="DIR", help="captures of its development workloads")
    options = parser.parse_args()
    traces = options.data / "traces"
    shared_variance(options.data)
    series = {}
    for name in LATER:
        graph = read_job(traces / name).graphs[0]
        series[name] = host_totals(graph)[first_whole_step(graph) + 1:]
    host_windows(series, "host time of the traces' later steps")
    if options.development:
        host_windows(unwatched(options.development), "development runs on this CPU")
        show("development sizes (constants were chosen on these)", cpu_sizes(_kept(DEVELOPMENT, options.development),
                                                                             options.development))
    found = {"steps that follow": later_steps(traces), "another device, with its host": device_pairs(traces)}
    if options.cpu:
        found["sizes on this CPU"] = cpu_sizes(REPORTED, options.cpu)
    for label, each in found.items():
        show(label, each)
    every = list(itertools.chain(*found.values()))
    print(f"\nall held-out predictions: {sum(one.inside for one in every)} of {len(every)} inside "
          f"({np.mean([one.inside for one in every]):.0%})")


def _kept(plans: tuple[Plan, ...], folder: Path) -> tuple[Plan, ...]:
    """Plans with runs in the folder."""
    return tuple(plan for plan in plans if any(path.name.startswith(plan.workload) for path in folder.iterdir()))


if __name__ == "__main__":
    main()
