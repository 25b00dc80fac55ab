"""Say how far apart hosts lie, each told by all others: what a host nobody measured may take.

    python benchmarks/host_prior.py [DATA]

DATA is a folder of public recordings (``traces`` in it: HolisticTraceAnalysis, PARAM, TraceLens, Kineto samples,
modded-nanogpt). A host is the law of ``gpu-steps`` (``benchmarks/fit_hosts.py``) times one factor: the mean of its
recordings' logarithms, measured over predicted by a law that knows nothing of this host. Factors are taken as
log-normal around a law of one feature that every recording tells, the profiler's own cost of an event
(``kernel_models/host/overheads.py``), which stands for the speed of one thread:

    log factor = offset + exponent · log(event / usual event) ± spread

The exponent is drawn towards what is expected, as if other hosts had told it (a ridge regression). Each host is told by
all others, whose factors are then of laws without this host too. Clock, Python and PyTorch versions are no features:
published recordings do not name their CPUs, and half of them name neither version.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from graph_predictor.prediction.host_steps import recorded_host_steps
from kernel_models.host.events import HostStep
from kernel_models.host.fitting import fit_host
from kernel_models.host.model import HostModel
from kernel_models.host.segments import event_cost
from kernel_models.spreads import END, UNKNOWN_HOST
from tracer.job import read_job

EXPONENT, WEIGHT = 0.5, 1.0
"""Expected of the exponent before any host was looked at, and the squared e-folds of events this counts for: 1 if an
event's cost were the speed of one thread alone, 0 if it were the profiler's options alone (execution traces, stacks).
Set, not measured."""

HOSTS = {
    "V100, 2021": ("resnet50-V100-2021/list-form-2020.json.gz", "resnet50-V100-2021/loader-workers-0.json.gz"),
    "V100": ("resnet50-V100",),
    "8×V100, 2023": ("dlrm-8xV100-2023",),
    "2×A100": ("resnet50-ddp-2xA100",),
    "8×A100, 2022": ("rank3-of-8xA100-6steps",),
    "H100, inference": tuple(f"h100-vs-mi300/h100-{name}.json.gz" for name in (
        "Qwen_Qwen1.5-0.5B-Chat", "gaunernst_bert-small-uncased", "google_owlv2-large-patch14-ensemble")),
    "MI300, inference": tuple(f"h100-vs-mi300/mi300-{name}.json.gz" for name in (
        "Qwen_Qwen1.5-0.5B-Chat", "gaunernst_bert-small-uncased", "google_owlv2-large-patch14-ensemble")),
    "8×H100, nanoGPT": ("nanogpt-rank0-of-8xH100", "nanogpt-8xH100"),
    "MI300X, DDP": ("resnet18-ddp-MI300X",),
    "RTX 2080 Ti": ("linear-2080Ti",),
    "B200, vLLM": ("vllm-eager-B200",),
    "128 ranks": ("rank0-1-of-128/sampled_rank-0.json.gz",),
}
IN_LAW = {"V100": 1, "8×V100, 2023": 1, "8×A100, 2022": 1, "H100, inference": 3, "MI300, inference": 3,
          "8×H100, nanoGPT": 1}
"""Hosts whose steps ``gpu-steps`` knows, and of how many of their recordings, the first ones."""
UNFITTED = {"MI300X, DDP": "waits in frees, which the trace does not tell from work",
            "128 ranks": "waits, which the trace does not tell from work"}
"""Hosts that are printed and no part of the fit, and why."""


@dataclass(frozen=True, slots=True)
class HostFactor:
    """One host's time over what a law of others tells of it, and the profiler's cost of an event there, ns."""

    name: str
    factor: float
    event_ns: float


@dataclass(frozen=True, slots=True)
class HostPrior:
    """The distribution of a host's factor: the logarithm of its middle at ``event_ns``, the exponent of an event's
    cost, and the log half width of the 80% interval of a host that was not fitted."""

    offset: float
    exponent: float
    event_ns: float
    spread: float

    def factor(self, event_ns: float) -> float:
        """Return the middle at the profiler's cost of an event, ns."""
        return float(np.exp(self.offset + self.exponent * np.log(event_ns / self.event_ns)))


def fit_prior(hosts: Sequence[HostFactor], exponent: float | None = None) -> HostPrior:
    """Fit to three hosts or more; ``exponent`` sets the law's instead of fitting it."""
    value = np.log([host.factor for host in hosts])
    event = np.log([host.event_ns for host in hosts])
    x, y = event - event.mean(), value - value.mean()
    fitted = float(x @ x / (x @ x + WEIGHT)) if exponent is None else 0.0
    if exponent is None:
        exponent = float((x @ y + WEIGHT * EXPONENT) / (x @ x + WEIGHT))
    missed, size = y - exponent * x, len(hosts)
    apart = float(np.sqrt(missed @ missed / (size - 1 - fitted) * (1 + 1 / size)))
    return HostPrior(float(value.mean()), exponent, float(np.exp(event.mean())), END * apart)


def main() -> None:
    """Print each host."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path, nargs="?", default=Path(os.environ.get("FORETRACE_DATA", "../shared/data")))
    steps, events = _recorded(parser.parse_args().data / "traces")

    @cache
    def law(without: frozenset[str]) -> HostModel:
        return fit_host([step for name, size in IN_LAW.items() if name not in without
                         for step in steps[name][:size]])

    @cache
    def factor(host: str, without: frozenset[str]) -> HostFactor:
        model = law((without | {host}) & frozenset(IN_LAW))
        told = [sum(float(part.sum()) for part in model.estimate(step)) for step in steps[host]]
        logs = [np.log(step.host_ns / total) for step, total in zip(steps[host], told, strict=True)]
        return HostFactor(host, float(np.exp(np.mean(logs))), events[host])

    fitted = [host for host in steps if host not in UNFITTED]

    def prior(host: str, exponent: float | None = None) -> HostPrior:
        return fit_prior([factor(other, frozenset([host])) for other in fitted if other != host], exponent)

    print(f"{'host':20}recordings  event µs  factor    told     error   80% interval")
    for host in steps:
        found, of = factor(host, frozenset()), prior(host)
        told, half = of.factor(found.event_ns), np.exp(of.spread)
        print(f"{host:20}{len(steps[host]):10}{found.event_ns / 1e3:10.2f}{found.factor:8.2f}{told:8.2f}"
              f"{told / found.factor - 1:+10.1%}   {told / half:.2f} to {told * half:.2f}"
              f"{f'   not fitted: {UNFITTED[host]}' if host in UNFITTED else ''}")
    cases = [factor(host, frozenset()) for host in fitted]
    _judged("a factor of 1, as shipped", cases, [HostPrior(0.0, 0.0, 1.0, UNKNOWN_HOST)] * len(cases))
    _judged("others' mean", cases, [prior(host, 0.0) for host in fitted])
    _judged("others' law of events", cases, [prior(host) for host in fitted])
    for title, of in (("others' mean", fit_prior(cases, 0.0)), ("law of events", fit_prior(cases))):
        print(f"All hosts, {title}: {np.exp(of.offset):.2f} · (event / {of.event_ns / 1e3:.2f} µs)^{of.exponent:.2f}, "
              f"×/÷ {np.exp(of.spread):.2f} in 80%")


def _recorded(traces: Path) -> tuple[dict[str, list[HostStep]], dict[str, float]]:
    """Each host's steps, one of each recording, and its cost of an event, ns."""
    steps, events = {}, {}
    for host, paths in HOSTS.items():
        graphs = [read_job([str(traces / path)]).graphs[0] for path in paths]
        steps[host] = [recorded_host_steps([graph])[0] for graph in graphs]
        events[host] = float(np.exp(np.mean([np.log(event_cost(graph).ns) for graph in graphs])))
    return steps, events


def _judged(title: str, cases: Sequence[HostFactor], priors: Sequence[HostPrior]) -> None:
    logs = np.array([np.log(prior.factor(case.event_ns) / case.factor)
                     for case, prior in zip(cases, priors, strict=True)])
    spread = np.array([prior.spread for prior in priors])
    errors = np.expm1(logs)
    size = np.abs(errors)
    print(f"{title}: {len(cases)} hosts, MAPE {size.mean():.1%}, median {np.median(size):.1%}, bias "
          f"{errors.mean():+.1%}, p90 {np.quantile(size, 0.9):.1%}, max {size.max():.1%}; root mean square of logs "
          f"{np.sqrt((logs ** 2).mean()):.2f}; {(np.abs(logs) <= spread).mean():.0%} in the 80% interval (×/÷ "
          f"{np.exp(spread.mean()):.2f})")


if __name__ == "__main__":
    main()
