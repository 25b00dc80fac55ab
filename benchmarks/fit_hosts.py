"""Fit the host models that foretrace ships, and say how well hosts and programs that were left out are predicted.

    python benchmarks/fit_hosts.py [DATA] [--write]

``cpu-steps`` is of the programs in ``traces/host`` and ``traces/host-held-out``, whose operations compute on the host,
and of those that only the Xeon recorded (``traces/host-xeon``, ``traces/host-xeon-held-out``), at the EPYC's speed:
what is shipped knows all there is, and no accuracy is reported of it. ``cpu-plans`` is of those in ``traces/host`` and
``traces/host-parallel``, ``gpu-steps`` of traces in ``DATA``, one step each, less what the profiler's events cost by
their own word. Left out are those whose host time is
mostly a wait that the trace does not tell from work, and hosts that take several times as long as all others. How well
a model of ``traces/host`` alone tells the others is in ``benchmarks/host_model.py``.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path

import numpy as np

from graph_predictor.prediction.host_steps import read_rounds, recorded_host_steps
from kernel_models.host.events import HostStep
from kernel_models.host.fitting import fit_few, fit_host
from kernel_models.host.model import CPU_HOST, GPU_HOST, HOSTS, PLANS_HOST, HostModel, write_host
from tracer.job import read_job

PUBLISHED = {
    "DLRM, 8×V100": "dlrm-8xV100-2023", "ResNet-50, V100": "resnet50-V100",
    "recommendation, 8×A100": "rank3-of-8xA100-6steps", "nanoGPT, 8×H100": "nanogpt-rank0-of-8xH100",
    **{f"{name}, {host.upper()}": f"h100-vs-mi300/{host}-{file}.json.gz" for host in ("h100", "mi300")
       for name, file in (("Qwen", "Qwen_Qwen1.5-0.5B-Chat"), ("BERT", "gaunernst_bert-small-uncased"),
                          ("OWLv2", "google_owlv2-large-patch14-ensemble"))}}


def main() -> None:
    """Fit, report, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=Path(os.environ.get("FORETRACE_DATA", "../shared/data")))
    parser.add_argument("--write", action="store_true", help="write the models into the package")
    options = parser.parse_args()
    traces = Path(__file__).resolve().parents[1] / "traces"
    cpu = read_rounds(traces / "host")
    gpu = {name: recorded_host_steps(read_job([str(options.data / "traces" / path)]).graphs[:1])[0]
           for name, path in PUBLISHED.items()}
    known = {**cpu, **read_rounds(traces / "host-held-out")}
    other = {**read_rounds(traces / "host-xeon"), **read_rounds(traces / "host-xeon-held-out")}
    for title, steps in ((CPU_HOST, {**_at_the_speed_of(known, other), **known}), (GPU_HOST, gpu)):
        if title == GPU_HOST:
            _left_out(title, steps)
        if options.write:
            write_host(fit_host(list(steps.values()), title), HOSTS / f"{title}.json.gz")
    if options.write:
        plans = [*cpu.values(), *read_rounds(traces / "host-parallel").values()]
        write_host(fit_host(plans, PLANS_HOST), HOSTS / f"{PLANS_HOST}.json.gz")
    for host in ("H100", "MI300"):
        own = {f"{program}, {host}" for program in ("Qwen", "BERT", "OWLv2")}
        law = fit_host([step for name, step in gpu.items() if name not in own], "other hosts")
        mine = {name: gpu[name] for name in sorted(own)}
        _left_out(f"{host} alone", mine)
        _left_out(f"{host} and others' law", mine, partial(fit_few, law=law))
    _ranks(recorded_host_steps(read_job([str(options.data / "traces" / "dlrm-8xV100-2023")]).graphs))


def _at_the_speed_of(known: dict[str, HostStep], other: dict[str, HostStep]) -> dict[str, HostStep]:
    """Programs of another host as they would be on the one whose programs are known, by those that both ran."""
    factor = float(np.median([known[name].host_ns / step.host_ns for name, step in other.items() if name in known]))
    print(f"{len(other)} programs of another host, which takes {1 / factor:.2f} times as long")
    return {name: step.scaled(factor) for name, step in other.items()}


def _ranks(steps: list[HostStep]) -> None:
    """Each rank of a job by every two others."""
    errors = []
    for pair in combinations(range(len(steps)), 2):
        model = fit_host([steps[rank] for rank in pair])
        errors += [sum(float(part.sum()) for part in model.estimate(step)) / step.host_ns - 1
                   for rank, step in enumerate(steps) if rank not in pair]
    size = np.abs(errors)
    print(f"\nDLRM, 8×V100, each rank by every two others: {len(errors)} cases, MAPE {size.mean():.1%}, bias "
          f"{np.mean(errors):+.1%}, p90 {np.quantile(size, 0.9):.1%}, worst {size.max():.1%}; within 5%: "
          f"{(size <= 0.05).mean():.0%}; host ms {', '.join(f'{step.host_ns / 1e6:.2f}' for step in steps)}")


def _left_out(title: str, steps: dict[str, HostStep],
              fit: Callable[[Sequence[HostStep]], HostModel] = fit_host) -> None:
    errors = []
    print(f"\n{title:24}  host ms  predicted")
    for name, step in steps.items():
        model = fit([other for key, other in steps.items() if key != name])
        total = sum(float(part.sum()) for part in model.estimate(step))
        errors.append(total / step.host_ns - 1)
        print(f"{name:24}{step.host_ns / 1e6:9.2f}{errors[-1]:+10.1%}")
    size = np.abs(errors)
    print(f"MAPE {size.mean():.1%}, median {np.median(size):.1%}, bias {np.mean(errors):+.1%}, p90 "
          f"{np.quantile(size, 0.9):.1%}, worst {size.max():.1%}")


if __name__ == "__main__":
    main()
