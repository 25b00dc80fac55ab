"""Host overheads of published traces by kind, and how well those of two steps tell a third's.

    python benchmarks/host_overheads.py DATA

DATA is the folder of published traces (it holds ``traces/``). Host time is time on the host's threads
without waiting, as recorded, the profiler's own cost included; on a CPU without the computation itself, which stands
for the GPU's work. Stalls (pauses that belong to no operation) are counted apart: "with stalls" adds the mean stall
time of the fitted steps to the estimate and leaves the stalls in the truth.
"""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path

import numpy as np

from graph_predictor.prediction.overheads import measure_overheads, recorded_overheads
from kernel_models.host.overheads import Recorded, fit_overheads
from tracer.job import read_job

STEPS = {"resnet50-V100": "rank0.kineto.json.gz", "resnet50-ddp-2xA100": "rank0.kineto.json.gz",
         "rank3-of-8xA100-6steps": "rank3.kineto.json.gz"}
TABLES = ("dlrm-8xV100-2023/*.kineto.json.gz", "resnet50-V100/rank0.kineto.json.gz",
          "resnet50-ddp-2xA100/rank0.kineto.json.gz", "h100-vs-mi300/h100-Qwen_Qwen1.5-0.5B-Chat.json.gz",
          "h100-vs-mi300/h100-gaunernst_bert-small-uncased.json.gz", "vllm-eager-B200/rank0.json.gz")

MORE = ("h100-vs-mi300/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz",)
OWN = ("host/bert/round0", "host/resnet50/round0")
TOP = 20
BACKWARD = "autograd::engine::evaluate_function: "


def host_ns(part: Recorded) -> float:
    return float(part.segments.duration_ns.sum())


def kinds_table(data: Path) -> None:
    print("\nT1 to T5: events a step and rank, p10, median, p90 of one (µs), share of the host time\n")
    for name in TABLES:
        found = measure_overheads(read_job(sorted((data / "traces").glob(name))))
        print(f"{name}: {found.host_ns / 1e6:.1f} ms of host time in {found.step_ns / 1e6:.1f} ms, {found.steps} steps")
        for row in found.kinds:
            low, _, middle, _, high = (quantile / 1e3 for quantile in row.quantiles_ns)
            print(f"  {row.kind.label:32}{row.events:>7.0f}{low:>8.1f}{middle:>8.1f}{high:>8.1f}{row.share:>8.1%}")


def operations_table(data: Path) -> None:
    print("\nOperations by host time: mean µs of one event by kind, and how far off the mean of each kind is\n")
    own = Path(__file__).resolve().parents[1] / "traces"
    files = [*(sorted((data / "traces").glob(name)) for name in (*TABLES, *MORE)),
             *([own / name] for name in OWN)]
    for paths in files:
        found = measure_overheads(read_job(paths if len(paths) > 1 else paths[0]))
        every = [row for row in found.operations(len(found.overheads.table)) if row.step_ns]
        off = sum(abs(row.shared_ns - row.step_ns) for row in every) / sum(row.step_ns for row in every)
        print(f"{paths[0].parent.name}/{paths[0].name}: by shared means {off:.0%} of the operations' host time lies "
              "wrong")
        for row in every[:TOP]:
            means = (f"{row.kinds[kind].mean_ns / 1e3:.1f}" if kind in row.kinds else "-" for kind in row.host_kinds())
            print(f"  {row.name.removeprefix(BACKWARD)[:38]:40}{row.step_ns / 1e6:>8.2f} ms"
                  f"{row.shared_ns / row.step_ns - 1:>+9.0%}{''.join(f'{mean:>8}' for mean in means)}")


def steps_table(data: Path) -> None:
    print("\nTwo steps fitted, another predicted: every choice (host time without waiting)\n")
    print(f"{'trace':26}{'fitted':>9}{'step':>6}{'measured ms':>13}{'predicted ms':>14}{'error':>9}{'with stalls':>13}")
    for name, file in STEPS.items():
        recorded, _ = recorded_overheads(read_job(data / "traces" / name / file).graphs[0])
        stalls = recorded.stalls()
        calm, still = recorded.take(~stalls), recorded.take(stalls)
        errors, whole, first = [], [], []
        for fitted in combinations(range(len(recorded.step_names)), 2):
            overheads = fit_overheads([calm.steps(fitted)])
            stalled = host_ns(still.steps(fitted)) / 2
            for other in sorted({*range(len(recorded.step_names))} - {*fitted}):
                estimate, truth = overheads.estimate_ns(calm.steps([other])).sum(), host_ns(calm.steps([other]))
                errors.append(estimate / truth - 1)
                first.append(0 in (*fitted, other))
                whole.append((estimate + stalled) / host_ns(recorded.steps([other])) - 1)
                print(f"{name:26}{fitted[0]:>6}, {fitted[1]}{other:>5}{truth / 1e6:>13.3f}{estimate / 1e6:>14.3f}"
                      f"{errors[-1]:>+9.2%}{whole[-1]:>+13.2%}")
        print(f"{name}: {summary(errors)}; with stalls {summary(whole)}")
        if not all(first):
            later = [[value for value, one in zip(values, first, strict=True) if not one] for values in (errors, whole)]
            print(f"{name} without its first step: {summary(later[0])}; with stalls {summary(later[1])}")


def summary(errors: list[float]) -> str:
    size = np.abs(errors)
    return (f"mean absolute error {size.mean():.2%}, median {np.median(size):.2%}, bias {np.mean(errors):+.2%}, worst "
            f"{size.max():.2%}, {np.sum(size <= 0.03)} of {len(size)} within 3%")


def main() -> None:
    data = Path(sys.argv[1])
    kinds_table(data)
    operations_table(data)
    steps_table(data)


if __name__ == "__main__":
    main()
