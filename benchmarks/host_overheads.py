"""How well host overheads transfer: from two steps to the third, and from three workloads to a fourth.

    python benchmarks/host_overheads.py [DATA]

DATA is the folder of published traces (it holds ``traces/``); without it only the project's own captures are used.
Host time is time on the host's threads without waiting, as recorded, the profiler's own cost included; on a CPU without
the computation itself, which stands for the GPU's work. Stalls (pauses that belong to no operation) are counted apart:
"with stalls" adds the mean stall time of the fitted steps to the estimate and leaves the stalls in the truth.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from graph_predictor.overheads import recorded_overheads
from kernel_models.host.overheads import Recorded, fit_overheads
from tracer.job import read_job

TRACES = Path(__file__).resolve().parents[1] / "traces"
SUITE = ("dlrm-cpu", "resnet50-cpu", "bert-cpu", "llama-cpu")
STEPS = {"resnet50-V100": "rank0.kineto.json.gz", "resnet50-ddp-2xA100": "rank0.kineto.json.gz",
         "rank3-of-8xA100-6steps": "rank3.kineto.json.gz"}


def host_ns(part: Recorded) -> float:
    return float(part.segments.duration_ns.sum())


def steps_table(data: Path) -> None:
    print("\nTwo steps fitted, the next one predicted (host time without waiting)\n")
    print(f"{'trace':26}{'fitted':>9}{'step':>6}{'measured ms':>13}{'predicted ms':>14}{'error':>9}{'with stalls':>13}")
    for name, file in STEPS.items():
        recorded, _ = recorded_overheads(read_job(data / "traces" / name / file).graphs[0])
        stalls = recorded.stalls()
        calm = recorded.take(~stalls)
        for first in range(len(recorded.step_names) - 2):
            fitted, third = [first, first + 1], [first + 2]
            overheads = fit_overheads([calm.steps(fitted)])
            estimate, truth = overheads.estimate_ns(calm.steps(third)).sum(), host_ns(calm.steps(third))
            stalled = host_ns(recorded.take(stalls).steps(fitted)) / 2
            whole = (estimate + stalled) / host_ns(recorded.steps(third)) - 1
            print(f"{name:26}{first:>6}, {first + 1}{first + 2:>5}{truth / 1e6:>13.3f}{estimate / 1e6:>14.3f}"
                  f"{estimate / truth - 1:>+9.2%}{whole:>+13.2%}")


def workloads_table() -> None:
    print("\nThree workloads of the suite fitted, the fourth predicted (CPU captures; host time a step)\n")
    print(f"{'left out':16}{'measured ms':>13}{'predicted ms':>14}{'error':>9}{'unseen events':>15}")
    parts = {}
    for name in SUITE:
        recorded, _ = recorded_overheads(read_job(TRACES / name).graphs[0], profiled=True)
        parts[name] = recorded.take(~recorded.stalls() & (recorded.segments.step >= 0))
    errors = []
    for name in SUITE:
        overheads = fit_overheads([part for other, part in parts.items() if other != name])
        part = parts[name]
        estimate, truth, steps = overheads.estimate_ns(part).sum(), host_ns(part), len(part.step_names)
        unseen = np.mean([(kind, op, detail) not in overheads.table for kind, op, detail in zip(
            part.segments.kind.tolist(), part.op.tolist(), part.detail.tolist(), strict=True)])
        errors.append(estimate / truth - 1)
        print(f"{name:16}{truth / steps / 1e6:>13.3f}{estimate / steps / 1e6:>14.3f}{errors[-1]:>+9.2%}{unseen:>15.1%}")
    print(f"\nmean absolute error {np.abs(errors).mean():.2%}, bias {np.mean(errors):+.2%}, "
          f"worst {np.abs(errors).max():.2%}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        steps_table(Path(sys.argv[1]))
    workloads_table()
