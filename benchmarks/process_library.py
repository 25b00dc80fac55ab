"""Our Gaussian process beside scikit-learn's: error on held-out calls, and the time of a fit.

    python benchmarks/process_library.py DATA

DATA is the folder with `kernels/`. Both learn log(time / fitted formula) of as many calls as a calibration has, of
stacks of the published tables; a fifth of the shape groups is held out by the hash of their label. scikit-learn's is a
constant times a Matérn kernel over sizes and one-hot variants, and noise; "trees" are those that are mixed in
(`kernel_models/learned/gaussian.py`), by themselves. Errors in percent; CPU seconds of the fit and 1,500 predictions.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

from kernel_models.datasets.samples import Samples
from kernel_models.datasets.tables import read_table
from kernel_models.device import device
from kernel_models.heuristics.efficiency import fit_efficiencies
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.learned.boosted import Intervals
from kernel_models.learned.fit import Problem
from kernel_models.learned.gaussian import TREES
from kernel_models.learned.process import Points, fit_process
from kernel_models.scores import errors_of

STACKS = (("gemm_forward", "h200-sxm"), ("gemm_forward", "l40s"), ("attention_forward_causal", "h100-sxm"))
"""Tables and devices, of each the largest stack."""
ROWS, JUDGED = (60, 150, 300, 800), 1500
Numbers = np.ndarray


def compare(fit: Samples, held: Samples) -> None:
    """Print a line for each way to learn."""
    spec, name = device(fit.device), f"{fit.device} {fit.family.value} {len(fit)}"
    formula = RooflineModel(fit.family, spec, fit_efficiencies(fit.calls, fit.measured_us, spec))
    points = Points.of(fit.family, fit.calls)
    held = held.taken(points.within(held.calls, np.inf))
    (x, v), (asked_x, asked_v) = points.points(fit.calls), points.points(held.calls)
    y = np.log(fit.measured_us / formula.predict(fit.calls).time_us)
    usual = formula.predict(held.calls).time_us

    def hot(codes: Numbers) -> Numbers:
        return np.hstack([codes[:, [k]] == np.arange(len(part)) for k, part in enumerate(points.parts)]).astype(float)

    def ours() -> Numbers:
        return usual * np.exp(fit_process(x, v, y).predict(asked_x, asked_v)[0])

    def theirs() -> Numbers:
        rows = np.hstack([x, hot(v)])
        kernel = (ConstantKernel(0.1, (1e-4, 1e2)) * Matern(np.full(rows.shape[1], 4.0), (1e-2, 1e4), nu=2.5)
                  + WhiteKernel(4e-4, (2.5e-5, 1.0)))
        return usual * np.exp(GaussianProcessRegressor(kernel).fit(rows, y).predict(np.hstack([asked_x, hot(asked_v)])))

    def trees() -> Numbers:
        nothing = Intervals.of(fit.measured_us, fit.measured_us)
        return Problem.of(fit, spec).model(TREES, nothing).predict(held.calls).time_us

    ways: dict[str, Callable[[], Numbers]] = {"formula": lambda: usual, "ours": ours, "scikit-learn": theirs,
                                              "trees": trees}
    for way, predict in ways.items():
        began = time.process_time()
        errors = errors_of(predict(), held.measured_us)
        print(f"{name:<28} {way:<14} {errors.mape * 100:>7.2f} {errors.median * 100:>7.2f} {errors.p90 * 100:>7.2f} "
              f"{time.process_time() - began:>8.2f}", flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # lengths at the ends of their bounds
    print(f"{'device, family, calls':<28} {'by':<14} {'MAPE':>7} {'median':>7} {'p90':>7} {'CPU s':>8}")
    for table, name in STACKS:
        found = [one for one in read_table(options.data / "kernels" / f"{table}.parquet") if one.device == name]
        one = max(found, key=len).aggregated()
        fit, held = one.taken(~one.split()), one.taken(one.split())
        judged = held.taken(np.random.default_rng(0).permutation(len(held))[:JUDGED])
        for count in ROWS:
            compare(fit.taken(np.random.default_rng(count).permutation(len(fit))[:count]), judged)


if __name__ == "__main__":
    main()
