"""How much computation and collectives slow each other down, fitted to some instances and tried on others.

    python benchmarks/contention.py DATA

``DATA`` is the folder with ``traces``. Instances of a kernel that lie beside a collective for a quarter of their time
or more are predicted from the median of the same kernel alone, times the slow-down that was fitted without them:

* *ranks left out*: each rank of the job in turn (a kernel's own slow-down, as other ranks show it);
* *steps left out*: each recorded step in turn, for a job of one recorded rank;
* *kernels left out*: each kernel in turn, with all its instances (the median of the others).

*Ignored* is the same without a slow-down. The error is that of the logarithm; *sum* is of all instances' time.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from graph_predictor.comm.contention import (
    LEAST_ALONE,
    SHORTEST_NS,
    Contention,
    Overlapping,
    OverlappingKernels,
    SlowDown,
    contention,
    fitted,
    kernel_identities,
    recorded_transfers,
)
from graph_predictor.simulation.build import Built, build_program, kernel_kinds
from tracer.arrays import Bool, Float64, Int64
from tracer.graph import KernelKind
from tracer.job import read_job

JOBS = ("nanogpt-8xH100", "nanogpt-rank0-of-8xH100", "rank3-of-8xA100-6steps", "dlrm-8xV100-2023")
TRIED = 0.25
"""Share of its time beside a collective from which an instance is tried."""


def main() -> None:
    """Print every job."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    traces = parser.parse_args().data / "traces"
    for job in JOBS:
        built = build_program(read_job(traces / job).graphs)
        print(f"\n{job}")
        found = contention(built)
        for name, one in (("kernels beside a transfer", found.transfer), ("kernels beside a waiting collective",
                          found.waiting), ("transfers beside computation", found.computing)):
            print(f"  {name:40}{_told(one)}")
        _try(built)


def _told(one: SlowDown) -> str:
    low, high = one.interval
    return (f"× {one.factor:.2f}, 80% of kernels {low:.2f} to {high:.2f}" if one.known else "too few on both sides") + (
        f" ({one.kernels} kernels, {one.instances} instances beside)")


def _try(built: Built) -> None:
    """Predict instances that lie beside collectives by what was fitted without them."""
    program, kind = built.program, kernel_kinds(built.graphs)
    transfer = recorded_transfers(built)
    shares = OverlappingKernels.of(program.kernel_ptr, kind, program.kernel_group).shares(
        program.recorded_kernel_start, program.recorded_kernel_end, transfer)
    code = kernel_identities(built.graphs)
    own = kind == KernelKind.COMPUTE
    logs = np.log(np.maximum(program.recorded_kernel_end - program.recorded_kernel_start, 1))
    steps = np.concatenate([graph.kernels.step for graph in built.graphs])
    tried = own & (shares.transfer + shares.waiting >= TRIED)
    left_out = {"ranks left out": program.kernel_rank()} if len(built.graphs) > 1 else {"steps left out": steps}
    for name, by in {**left_out, "kernels left out": code}.items():
        rows, ignored, told = [], [], []
        for part in np.unique(by[tried]).tolist():
            out = tried & (by == part)
            known = fitted(code, own, logs, shares, own & (by != part))
            for row, usual, more in _cases(code, logs, shares, out, own & ((by != part) | (by is code)), known):
                rows.append(row)
                ignored.append(usual)
                told.append(usual + more)
        if rows:
            truth = logs[np.array(rows)]
            print(f"  {name:18}{len(rows):6} instances; ignored: {_error(np.array(ignored), truth)}; slowed down: "
                  f"{_error(np.array(told), truth)}")


def _cases(code: Int64, logs: Float64, shares: Overlapping, out: Bool, known: Bool, found: Contention) -> Iterator[
        tuple[int, float, float]]:
    """Yield each instance that is left out, with the log of its kernel's time alone and of its slow-down."""
    alone: dict[int, list[float]] = defaultdict(list)
    for row in np.flatnonzero(known & (shares.transfer + shares.waiting <= 0.02)).tolist():
        alone[int(code[row])].append(float(logs[row]))
    more = found.log_factor(shares)
    for row in np.flatnonzero(out).tolist():
        lone = alone[int(code[row])]
        if len(lone) >= LEAST_ALONE and np.median(lone) >= np.log(SHORTEST_NS):
            yield row, float(np.median(lone)), float(more[row])


def _error(told: Float64, truth: Float64) -> str:
    apart = np.abs(np.expm1(told - truth))
    return (f"MAPE {apart.mean():.1%}, median {np.median(apart):.1%}, sum "
            f"{np.exp(told).sum() / np.exp(truth).sum() - 1:+.1%}")


if __name__ == "__main__":
    main()
