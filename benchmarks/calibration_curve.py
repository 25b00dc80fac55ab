"""Held-out error of a family against the minutes spent measuring it: as drawn, and by chance; measurements simulated.

    python benchmarks/calibration_curve.py DATA [--device h200-sxm] [--seeds 2]

DATA is the folder with `kernels/`. The rows of a published table stand for the device: a "measurement" looks its row
up and costs what the campaign's micro-benchmark would (`seconds_of`). A fifth of the shape groups is held out, by the
hash of their label (matrix products: the (n, k) site; attention: the head configuration); all choices are among the
rest. Errors are those of the model that `foretrace calibrate` fits to what was measured by then, on up to 1,500
held-out rows. "Everything" is the same model fitted to as many rows by chance as it takes at most.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from kernel_models.calibration.source import DRAWS
from kernel_models.datasets.samples import Samples
from kernel_models.datasets.tables import read_table
from kernel_models.device import device
from kernel_models.learned.gaussian import MOST_CALLS, fit_gaussian
from kernel_models.scores import Errors, errors_of
from tracer.campaign.micro import CUDA_BUDGET_S, LEAST_RUNS, PROFILED_RUNS, SLOW_RUNS, WARM_UP_RUNS

TABLES = ("gemm_forward", "attention_forward_causal")
MINUTES = (0.1, 0.2, 0.4, 0.8, 1.5, 2.5)
OVERHEAD_S = 0.12
"""Data, profile and messages of one measurement: about what the rehearsals on a CPU take."""
JUDGED = 1500


def seconds_of(time_us: float) -> float:
    """What one micro-benchmark takes: warm-up, the runs of both variants, the profiled runs, and the rest."""
    one = time_us / 1e6
    runs = LEAST_RUNS if LEAST_RUNS * one < CUDA_BUDGET_S else SLOW_RUNS
    return OVERHEAD_S + (WARM_UP_RUNS + PROFILED_RUNS + 2 * runs) * one


def largest(table: Path, gpu: str) -> Samples:
    """The stack of a device with most rows in 16 bits."""
    found = [one for one in read_table(table) if one.device == gpu and one.calls[0].dtype == "bf16"]
    return max(found, key=len).aggregated()


def order_drawn(fit: Samples, seconds: np.ndarray, seed: int) -> list[int]:
    """Rows in the order that a calibration draws them: each is one of a few, with odds of one over its seconds."""
    rng = np.random.default_rng(seed)
    left, found = rng.permutation(len(fit)).tolist(), list[int]()
    while len(found) < MOST_CALLS and left:
        few = left[-DRAWS:]
        odds = 1.0 / seconds[few]
        found.append(left.pop(int(rng.choice(len(few), p=odds / odds.sum())) - len(few)))
        rng.shuffle(left)
    return found


def judged(fit: Samples, rows: list[int], held: Samples) -> Errors:
    """Errors of the model of these rows, on all held-out ones."""
    model, _ = fit_gaussian(fit.taken(np.array(sorted(rows), np.int64)), device(fit.device))
    return errors_of(model.predict(held.calls).time_us, held.measured_us)


def curve(table: Path, gpu: str, seeds: int) -> None:
    """Print the curve of one table."""
    samples = largest(table, gpu)
    held_out = samples.split()
    fit, held = samples.taken(~held_out), samples.taken(held_out)
    rng = np.random.default_rng(0)
    held = held.taken(np.sort(rng.permutation(len(held))[:JUDGED]))
    seconds = np.array([seconds_of(float(one)) for one in fit.measured_us])
    print(f"\n{samples.family.value} on {gpu}, {samples.software}: {len(fit)} rows to choose from, {len(held)} held "
          f"out; a measurement takes {np.median(seconds):.2f} s (median), all {seconds.sum() / 3600:.1f} hours")
    print(f"{'minutes':>7}   {'drawn: n':>10} {'MAPE':>6} {'p90':>6}   {'by chance: n':>12} {'MAPE':>6} {'p90':>6}")
    begun = time.monotonic()
    drawn = [order_drawn(fit, seconds, seed) for seed in range(seeds)]
    chance = [np.random.default_rng(100 + seed).permutation(len(fit))[:MOST_CALLS].tolist() for seed in range(seeds)]
    for minutes in MINUTES:
        cells = []
        for orders in (drawn, chance):
            errors, counts = [], []
            for order in orders:
                rows = order[:max(int(np.searchsorted(np.cumsum(seconds[order]), minutes * 60)), 12)]
                errors.append(judged(fit, rows, held))
                counts.append(len(rows))
            cells.append((np.mean(counts), np.mean([one.mape for one in errors]), np.mean([one.p90 for one in errors])))
        print(f"{minutes:>7.1f}   {cells[0][0]:>10.0f} {cells[0][1] * 100:>6.1f} {cells[0][2] * 100:>6.1f}   "
              f"{cells[1][0]:>12.0f} {cells[1][1] * 100:>6.1f} {cells[1][2] * 100:>6.1f}", flush=True)
    everything = judged(fit, chance[0], held)
    print(f"everything that the model takes ({len(chance[0])} rows by chance): MAPE {everything.mape * 100:.1f}, p90 "
          f"{everything.p90 * 100:.1f}  ({time.monotonic() - begun:.0f} s to simulate)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="h200-sxm")
    parser.add_argument("--seeds", type=int, default=2, help="runs whose mean is shown")
    options = parser.parse_args()
    for name in TABLES:
        curve(options.data / "kernels" / f"{name}.parquet", options.device, options.seeds)


if __name__ == "__main__":
    main()
