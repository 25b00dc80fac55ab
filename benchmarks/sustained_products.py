"""What boards sustain of their matrix units' rate: products of SimuMax's tables against bursts at the default rates.

    python benchmarks/sustained_products.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with
`kernels/training_kernels_simumax.parquet` (github.com/MooreThreads/SimuMax). Half of the sizes (by a hash of m, n and
k, fixed before looking) give the sustained share of the peak: the median of products that a burst would run at 0.7 of
the peak and more. The other half is judged, with `kernel_models.pricing` as it is shipped and without.
"""

from __future__ import annotations

import argparse
import os
import re
import zlib
from pathlib import Path

import numpy as np
import pandas as pd

from kernel_models.device import device
from kernel_models.families.gemm import gemm
from kernel_models.op_call import OpCall
from kernel_models.pricing import price, sustained, sustained_tflops

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
LAYOUTS = {"TN": "nt", "NN": "nn", "NT": "tn"}
"""The table's layouts, of column-major matrices, as ours: forward, input gradient, weight gradient."""
LONG = 0.7
"""Share of the peak from which a burst's product says what is sustained."""


def call_of(shape: str) -> OpCall:
    """The call of a row of the table."""
    m, k, n = (int(re.search(rf"\b{name}=(\d+)", shape)[1]) for name in "mkn")  # type: ignore[index]
    layout = LAYOUTS[re.search(r"layout=(\w+)", shape)[1]]  # type: ignore[index]
    return next(gemm(1, m, n, k, "bf16", layout, added="accumulate" if "accumulate=True" in shape else "",
                     out_dtype="fp32" if "out_dtype=fp32" in shape else ""))


def figures(ratio: np.ndarray) -> str:
    """Errors of predicted over measured times, percent."""
    signed = 100 * (ratio - 1)
    size = np.abs(signed)
    return (f"{len(ratio):>5}{size.mean():>8.1f}{np.median(size):>9.1f}{signed.mean():>+8.1f}"
            f"{np.quantile(size, 0.9):>8.1f}{size.max():>8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    table = pd.read_parquet(parser.parse_args().data / "kernels" / "training_kernels_simumax.parquet")
    table = table[table.op == "matmul"]
    for name, rows in table.groupby("gpu"):
        spec = device(str(name))
        calls = [call_of(shape) for shape in rows["shape"]]
        burst = price(calls, spec)
        long = sustained(burst, spec)
        flops = np.array([call.flops for call in calls])
        peak = spec.peak_tflops("bf16", matrix=True)
        us = flops / (rows.peak_tflops * rows.efficiency * 1e6).to_numpy()
        fitted = np.array([zlib.crc32(str(call.dims).encode()) % 2 == 0 for call in calls])
        busy = flops / burst.times_us / 1e6 / peak >= LONG
        reached = flops / us / 1e6 / peak
        print(f"\n{spec.name}, {spec.power_w:g} W, {len(rows)} products: sustained share of the peak, of those that a "
              f"burst runs at {LONG:g} and more: {np.median(reached[fitted & busy]):.3f} ({(fitted & busy).sum()} of "
              f"the fitted half), {np.median(reached[~fitted & busy]):.3f} (the other half); shipped "
              f"{sustained_tflops(spec, 'bf16') / peak:.3f}")
        print(f"{'judged half':12}{'rows':>5}{'MAPE':>8}{'median':>9}{'bias':>8}{'p90':>8}{'max':>8}")
        print(f"{'as a burst':12}{figures(burst.times_us[~fitted] / us[~fitted])}")
        print(f"{'sustained':12}{figures(long.times_us[~fitted] / us[~fitted])}")
        order = np.argsort(us)
        for part in np.array_split(order[~fitted[order]], 4):
            print(f"  {us[part].min():>9,.0f} to {us[part].max():>7,.0f} µs{figures(long.times_us[part] / us[part])}")


if __name__ == "__main__":
    main()
