"""Fit the default efficiencies of a CPU from a calibration of one, and how well they hold on shapes left out.

    foretrace calibrate --on cpu --minutes 6 --work out/cpu -o out/cpu.profile
    python benchmarks/host_efficiencies.py out/cpu [--write] [--mend "conv*,norm/*_backward"]

The shapes that the calibration holds out are not fitted to; their errors are printed and give the intervals, widened
since it is one CPU. `--write` writes kernel_models/heuristics/efficiencies_host.toml. With
`--mend` only keys that look so are replaced, after the calibrated machine is brought to the file's: by the median
ratio of every other key's figure in the file to the one fitted here.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch

import numpy as np
from datasheet_traces import START
from default_efficiencies import FEW, ONE_DEVICE, ROOT, chains, written

from kernel_models.datasets import read_samples
from kernel_models.datasets.samples import Samples, joined
from kernel_models.device import device
from kernel_models.heuristics.efficiency import (
    HOST_DEFAULTS_FILE,
    Efficiencies,
    Efficiency,
    Measured,
    default_efficiencies,
    fit_over_devices,
    spread,
)
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.op_call import Family

COLD_BYTES = 1 << 20
"""Operands of this size are not in a core's cache when a step comes to them; those of a measurement that is repeated
are. What products take to read their operands is therefore told by larger ones alone."""
FLOPS_PER_BYTE = 40.0
"""Products of more arithmetic than that say what arithmetic takes, wherever their operands are."""
MOST_BYTES = 1 << 25
"""From here on the C library returns memory to the system at every call, which then hands out fresh pages: such a call
takes many times as long, and what share of a fit's weight it has is chance."""
SOURCE = "calibration of one thread of an AMD EPYC with AVX2 (torch 2.13)"


def residuals(samples: list[Samples], efficiencies: Efficiencies) -> dict[str, list[float]]:
    """Log of measured over predicted by key, of the shapes that were held out."""
    spec, found = device("cpu"), dict[str, list[float]]()
    for one in samples:
        rows = np.flatnonzero(one.held_out)
        if not len(rows):
            continue
        calls = [one.calls[row] for row in rows]
        log = np.log(one.measured_us[rows] / RooflineModel(calls[0].family, spec, efficiencies).predict(calls).time_us)
        for chain, value in zip(chains(calls), log, strict=True):
            for key in chain:
                found.setdefault(key, []).append(float(value))
    return found


def _told(samples: Samples) -> np.ndarray:
    """Rows that say what a step's calls would take."""
    moved = np.array([call.bytes_moved for call in samples.calls])
    usual = moved < MOST_BYTES
    if samples.family is not Family.GEMM:
        return usual
    flops = np.array([call.flops for call in samples.calls])
    return usual & ((moved >= COLD_BYTES) | (flops > FLOPS_PER_BYTE * moved))


def defaults(samples: list[Samples]) -> tuple[Efficiencies, dict[str, list[float]]]:
    """Efficiencies fitted to what is not held out, with intervals from what is."""
    spec = device("cpu")
    samples = [one.taken(_told(one)) for one in samples]
    fitted = fit_over_devices([Measured([one.calls[row] for row in np.flatnonzero(~one.held_out)],
                                        one.measured_us[~one.held_out], spec) for one in samples],
                              base=START, source=SOURCE)
    left = residuals(samples, fitted)
    entries = {}
    for key, entry in sorted(fitted.entries.items()):
        of_key = left.get(key, [])
        low, high = spread(np.array(of_key)) if len(of_key) >= FEW // 2 else (entry.low, entry.high)
        entries[key] = replace(entry, low=low * ONE_DEVICE, high=high * ONE_DEVICE)
    everything = [value for key, values in left.items() if "/" not in key for value in values]
    low, high = spread(np.array(everything))
    typical = {name: float(np.median([getattr(entries[f.value], name) for f in Family if f.value in entries]))
               for name in ("compute", "memory", "fixed")}
    entries["*"] = Efficiency(**typical, low=low * ONE_DEVICE, high=high * ONE_DEVICE,
                              source="medians of the families below")
    return Efficiencies(entries), left


def mended(kept: Efficiencies, fitted: Efficiencies, keys: Sequence[str]) -> Efficiencies:
    """Return the file's efficiencies with some keys' from another machine, scaled as the other keys' differ."""
    def is_named(key: str) -> bool:
        return any(fnmatch(key, one) for one in keys)

    others = [(kept.entries[key], entry) for key, entry in fitted.entries.items()
              if key in kept.entries and key != "*" and not is_named(key)]
    ratios = {name: float(np.median([getattr(old, name) / getattr(new, name) for old, new in others]))
              for name in ("memory", "fixed")}
    print("brought to the file's machine: " + ", ".join(f"{name} × {ratio:.2f}" for name, ratio in ratios.items()))
    changed = {key: replace(entry, memory=entry.memory * ratios["memory"], fixed=entry.fixed * ratios["fixed"])
               for key, entry in fitted.entries.items() if is_named(key)}
    return replace(kept, entries={key: changed.get(key, entry) for key, entry in kept.entries.items()} | changed)


def main() -> None:
    """Fit, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("calibration", nargs="+", help="working directories of `foretrace calibrate --on cpu`")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--mend", default="", help="keys, with *, separated by commas")
    arguments = parser.parse_args()
    samples = joined(one for one in read_samples(arguments.calibration) if one.held_out is not None)
    result, left = defaults(samples)
    print(f"{'key':34}{'held out':>9}{'compute':>9}{'memory':>9}{'fixed':>8}{'median |error|':>16}{'bias':>8}"
          f"{'p90':>8}")
    for key, e in result.entries.items():
        error = np.expm1(-np.array(left.get(key, [])))
        told = "" if not len(error) else (f"{np.median(np.abs(error)):16.0%}{error.mean():+8.0%}"
                                          f"{np.quantile(np.abs(error), 0.9):8.0%}")
        print(f"{key:34}{len(error):9}{e.compute:9.2f}{e.memory:9.2f}{e.fixed:8.2f}{told}")
    if arguments.write:
        if arguments.mend:
            result = mended(default_efficiencies("host"), result, arguments.mend.split(","))
        HOST_DEFAULTS_FILE.write_text(written(result, "benchmarks/host_efficiencies.py"), encoding="utf-8")
        print(f"wrote {HOST_DEFAULTS_FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
