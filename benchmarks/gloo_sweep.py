"""Real gloo runs on this machine: sweep, fit, and predict sizes that were not fitted.

    python benchmarks/gloo_sweep.py [--processes 2 4] [--rounds 31]

Every second size of a sweep is left out of the fit. Needs PyTorch. The machine should be idle: with more runnable
processes than cores the times measure the scheduler.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np

from kernel_models.collectives import CommProfile, find_topology
from kernel_models.collectives.logs import read_log
from tracer.comm_bench import BenchPlan, run_bench, sweep_sizes

ASKED = "median <= 15%"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--kinds", nargs="+", default=["all_reduce", "all_gather", "broadcast", "all_to_all"])
    options = parser.parse_args()
    sizes = sweep_sizes(1024, 16 << 20, 2)
    print(f"{'processes':>9} "
          f"{'collective':14}{'fitted':>7}{'left out':>9}{'median':>8}{'p90':>8}{'bias':>8}{'in 80%':>8}"
          f"   asked {ASKED}")
    for processes in options.processes:
        with tempfile.TemporaryDirectory() as folder:
            out = run_bench(BenchPlan(tuple(options.kinds), sizes, rounds=options.rounds), processes,
                            Path(folder) / "gloo.jsonl")
            rows = read_log(str(out)).aggregated()
        size_rank = np.searchsorted(np.unique(rows.batch.payload_bytes), rows.batch.payload_bytes)
        fit = np.zeros(len(rows), bool)
        for kind in np.unique(rows.batch.kind):
            mine = np.flatnonzero(rows.batch.kind == kind)
            fit[mine[np.argsort(size_rank[mine])][::2]] = True
        profile = CommProfile.fit(rows.take(fit), find_topology("cpu"))
        for kind in [*options.kinds, "all"]:
            names = np.array([_label(k) for k in rows.batch.kind])
            out_rows = ~fit & ((names == kind) | (kind == "all"))
            if not out_rows.any():
                continue
            left = rows.take(out_rows)
            times = profile.predict(left.batch)
            error = times.time_us / left.time_us - 1
            inside = (left.time_us >= times.low_us) & (left.time_us <= times.high_us)
            fitted = int((fit & ((names == kind) | (kind == "all"))).sum())
            print(f"{processes:9} {kind:14}{fitted:7}{len(left):9}"
                  f"{np.median(abs(error)):8.1%}{np.quantile(abs(error), 0.9):8.1%}{error.mean():+8.1%}"
                  f"{inside.mean():8.0%}")


def _label(kind: int) -> str:
    from kernel_models.collectives import CollectiveKind

    return CollectiveKind(int(kind)).label


if __name__ == "__main__":
    main()
