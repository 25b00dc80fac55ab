"""Predictions against what was measured, on traces recorded by others.

    python benchmarks/predict_traces.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with `traces/`.
Nothing here is fitted to what it is compared with: kernels are scaled between devices by data sheets and the default
efficiencies (`kernel_models/heuristics/efficiencies.toml`, from published tables and other traces), and `--host-from`
takes only host time from the other trace.

1. *Other devices.* Each trace of a pair is predicted on the other's device, with its own host and with the other's.
   Measured is the other trace's own steady state (its replay, repeated), and its recorded steps.
   The pairs of H100 and MI300X are predicted a second time with models of both devices that the traces of the *other*
   model gave (`foretrace fit`): what a user with traces of both devices, but not of this program, would have. Nothing
   of a pair is used to predict it.
2. *Later steps.* Models are fitted to the first two steps of each trace, kernels' medians and host overheads; the steps
   that follow are predicted from these alone. A first step that holds less work than the next one (a window's ragged
   start) is left out.
3. *Time of one prediction*, of about 10,000 operations, once loaded.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
from fitted_times import Fitted

from foretrace.edits import Device, Edit, HostFrom
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.datasets import read_samples
from kernel_models.fitting import fit_profile
from tracer.graph import ExecutionGraph
from tracer.job import Job, read_job

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
PAIRS = (
    ("resnet50-V100", "resnet50-ddp-2xA100", "ResNet-50 V100 → A100"),
    ("h100-vs-mi300/h100-Qwen_Qwen1.5-0.5B-Chat.json.gz", "h100-vs-mi300/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz",
     "Qwen1.5-0.5B H100 → MI300X"),
    ("h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz",
     "h100-vs-mi300/mi300-gaunernst_bert-small-uncased.json.gz",
     "BERT-small H100 → MI300X"),
)
LATER = ("resnet50-V100", "resnet50-V100-2021/list-form-2020.json.gz", "resnet50-V100-2021/loader-workers-0.json.gz",
         "resnet50-ddp-2xA100", "rank3-of-8xA100-6steps", "linear-2080Ti")
"""Every trace with more than two steps."""
FIT = 2
BIG = ("resnet50-V100", range(3, 5))
"""Two steps of 4,796 operations."""


def other_devices(traces: Path) -> None:
    """Print the table of predictions across devices."""
    print(f"{'pair':30}{'host of':>10}{'GPU active ms':>15}{'measured':>10}{'error':>9}{'step ms':>10}{'steady':>9}"
          f"{'error':>9}{'recorded':>10}{'80% interval':>18}  {'bound (measured)'}")
    for first, second, name in PAIRS:
        jobs = read_job(traces / first), read_job(traces / second)
        for source, target, label in ((0, 1, name), (1, 0, _reversed(name))):
            _pair(jobs[source], jobs[target], label)


def _pair(source: Job, target: Job, label: str) -> None:
    measured, baseline = baseline_of(target).predict(), baseline_of(source)
    spec = baseline_of(target).scenario.devices.source
    assert spec is not None
    other = HostFrom(target.graphs, "the other")
    for whose in ("its own", "the other"):
        edits: list[Edit] = [Device(spec)] if whose == "its own" else [Device(spec), other]
        said = baseline.predict(edits)
        low, high = said.interval_us
        print(f"{label:30}{whose:>10}{said.gpu_active_us / 1e3:15.3f}{measured.gpu_active_us / 1e3:10.3f}"
              f"{said.gpu_active_us / measured.gpu_active_us - 1:+9.1%}{said.step_time_us / 1e3:10.2f}"
              f"{measured.step_time_us / 1e3:9.2f}{said.step_time_us / measured.step_time_us - 1:+9.1%}"
              f"{(measured.recorded_us or 0) / 1e3:10.2f}{f'{low / 1e3:.1f} to {high / 1e3:.1f}':>18}"
              f"  {said.bound} ({measured.bound})")
        if whose == "its own":
            for note in said.notes:
                print(f"{'':30}  {note}")


def other_programs(traces: Path) -> None:
    """Print GPU active time across H100 and MI300X with both devices' models fitted to the other program's traces."""
    pairs = [pair for pair in PAIRS if pair[0].startswith("h100-vs-mi300")]
    print(f"\n{'pair':30}{'models fitted to':>26}{'GPU active ms':>15}{'measured':>10}{'error':>9}{'data sheets':>13}")
    for first, second, name in pairs:
        for *fitted, other in (pair for pair in pairs if pair[2] != name):
            profiles = {one.device.name: one for one in (fit_profile(read_samples([str(traces / path)]))
                                                         for path in fitted)}
            jobs = read_job(traces / first), read_job(traces / second)
            for source, target, label in ((0, 1, name), (1, 0, _reversed(name))):
                measured = baseline_of(jobs[target])
                spec, active = measured.scenario.devices.source, measured.predict().gpu_active_us
                assert spec is not None
                plain = baseline_of(jobs[source]).predict([Device(spec)]).gpu_active_us
                models = profiles.get(spec.name)
                said = baseline_of(jobs[source]).with_models(profiles).predict([Device(spec, models)]).gpu_active_us
                print(f"{label:30}{other.split()[0]:>26}{said / 1e3:15.3f}{active / 1e3:10.3f}{said / active - 1:+9.1%}"
                      f"{plain / active - 1:+13.1%}")


def _reversed(name: str) -> str:
    model, left, _, right = name.rsplit(" ", 3)
    return f"{model} {right} → {left}"


def first_whole_step(graph: ExecutionGraph) -> int:
    """0, or 1 if the first step holds over 1% fewer operations than the second."""
    count = np.bincount(graph.ops.step[graph.ops.step >= 0], minlength=len(graph.steps))
    return int(count[0] < 0.99 * count[1])


def later_steps(traces: Path) -> None:
    """Print the table of predictions of steps to come."""
    print(f"\n{'fitted to steps 1–2':46}{'predicted ms':>13}{'steps':>7}{'MAPE':>8}{'bias':>8}{'p90':>8}{'max':>8}  "
          "measured")
    every, by_trace = [], []
    for name in LATER:
        job = read_job(traces / name)
        graph = job.graphs[0]
        begin = first_whole_step(graph)
        said = baseline_of(job, range(begin, begin + FIT)).predict([Fitted()]).step_time_us / 1e3
        measured = graph.steps.duration_ns[begin + FIT:] / 1e6
        error = said / measured - 1
        every.append(error)
        by_trace.append((float(np.abs(error).mean()), float(error.mean())))
        print(f"{name:46}{said:13.2f}{len(error):7}{np.abs(error).mean():8.1%}{error.mean():+8.1%}"
              f"{np.quantile(np.abs(error), 0.9):8.1%}{np.abs(error).max():8.1%}  "
              + " ".join(f"{m:.1f}" for m in measured[:6]) + (" …" if len(measured) > 6 else ""))
    errors, means = np.concatenate(every), np.array(by_trace)
    rest = [i for i, name in enumerate(LATER) if not name.startswith("linear")]
    print(f"all steps: MAPE {np.abs(errors).mean():.1%}, bias {errors.mean():+.1%}; mean of traces: MAPE "
          f"{means[:, 0].mean():.1%}, bias {means[:, 1].mean():+.1%}; without linear-2080Ti, whose host slows by a "
          "third after "
          f"its second step: MAPE {means[rest, 0].mean():.1%}, bias {means[rest, 1].mean():+.1%}")


def speed(traces: Path) -> None:
    """Print the time of one prediction."""
    job = read_job(traces / BIG[0])
    baseline = baseline_of(job, BIG[1])
    edit = [Device("a100-sxm-40g")]
    baseline.predict(edit)
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        baseline.predict(edit)
        times.append(time.perf_counter() - begin)
    ops = int(np.isin(job.graphs[0].ops.step, list(BIG[1])).sum())
    print(f"\none prediction of {ops:,} operations on another device, with its interval: {np.median(times):.3f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    traces = parser.parse_args().data / "traces"
    other_devices(traces)
    other_programs(traces)
    later_steps(traces)
    speed(traces)


if __name__ == "__main__":
    main()
