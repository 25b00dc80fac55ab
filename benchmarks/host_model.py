"""Host time of programs that were never recorded, by a model of others on the same host.

    python benchmarks/host_model.py RECORDINGS [--held-out FOLDER] [--steps]

``RECORDINGS`` is a folder of programs with a folder of each round (``traces/record_host.py``). Each program is left
out in turn, predicted by the others, and beside it stands the host time that was measured: the median of its rounds.
Programs of ``--held-out`` are predicted by all of ``RECORDINGS``; nothing was chosen with them. With ``--steps`` the
workloads among them are traced by shapes, and their step with the others' host stands beside what it took unprofiled.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from graph_predictor.prediction.host_steps import recorded_host_steps, usual_step
from graph_predictor.sizes.retrace import trace_again
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.device_choice import traced_device
from kernel_models.host.model import HostModel, fit_host
from kernel_models.host.step_events import HostStep
from tracer.job import read_job


def read(folder: Path) -> dict[str, HostStep]:
    """Return the usual step of each program of a folder."""
    found = {}
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        rounds = [recorded_host_steps(read_job(one).graphs)[0] for one in sorted(path.glob("round*"))]
        if rounds:
            found[path.name] = usual_step(rounds)
    return found


def main() -> None:
    """Print every case and what they come to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path)
    parser.add_argument("--held-out", type=Path)
    parser.add_argument("--steps", action="store_true")
    options = parser.parse_args()
    steps = read(options.recordings)
    begin = time.perf_counter()
    whole = fit_host(list(steps.values()))
    print(f"Fit of {len(steps)} programs: {time.perf_counter() - begin:.2f} s; a + b log(compute): "
          f"{whole.offset:+.2f} {whole.exponent:+.2f}; interval ×/÷ {np.exp(whole.spread):.2f}")
    cases = [(name, step, fit_host([other for key, other in steps.items() if key != name]))
             for name, step in steps.items()]
    _table("left out in turn", cases)
    if options.steps:
        _steps(options.recordings, cases)
    if options.held_out is not None:
        _table("held out", [(name, step, whole) for name, step in read(options.held_out).items()])


def _steps(folder: Path, cases: list[tuple[str, HostStep, HostModel]]) -> None:
    """Steps traced by shapes, on the host that the others tell."""
    print(f"\n{'traced by shapes':24} measured  predicted   error  within")
    errors, held = [], []
    for name, _, model in cases:
        captures = [read_job(path).graphs[0] for path in sorted((folder / name).glob("round*"))]
        workload = captures[0].meta.workload
        if not workload:
            continue
        truth = float(np.median([np.median(graph.meta.unprofiled_step_ns) for graph in captures])) / 1e3
        traced = trace_again(captures[0], {}, traced_device("cpu"))
        found = baseline_of([traced], host=model).predict()
        low, high = found.interval_us
        errors.append(found.step_time_us / truth - 1)
        held.append(low <= truth <= high)
        print(f"{name:24}{truth:9,.0f}{found.step_time_us:11,.0f}{errors[-1]:+8.1%}  {'yes' if held[-1] else 'no'}")
    _sum(errors, held)


def _table(title: str, cases: list[tuple[str, HostStep, HostModel]]) -> None:
    print(f"\n{title:24} measured  predicted   error  known  within")
    errors, held = [], []
    for name, step, model in cases:
        before, inside = model.estimate(step)
        total = float(before.sum() + inside.sum())
        known = model.knows(step)
        spent = np.empty(len(known))
        spent[0::2], spent[1::2] = step.before_ns, step.inside_ns
        errors.append(total / step.host_ns - 1)
        held.append(abs(np.log(total / step.host_ns)) <= model.spread)
        print(f"{name:24}{step.host_ns / 1e3:9,.0f}{total / 1e3:11,.0f}{errors[-1]:+8.1%}"
              f"{float(spent @ known) / step.host_ns:7.0%}  {'yes' if held[-1] else 'no'}")
    _sum(errors, held)


def _sum(errors: list[float], held: list[bool]) -> None:
    size = np.abs(errors)
    print(f"MAPE {size.mean():.1%}, median {np.median(size):.1%}, bias {np.mean(errors):+.1%}, p90 "
          f"{np.quantile(size, 0.9):.1%}, worst {size.max():.1%}; within 10%: {(size <= 0.1).sum()} of {len(size)}; in "
          f"the 80% interval: {np.mean(held):.0%}")


if __name__ == "__main__":
    main()
