"""Speed of learned kernel models: calls priced a second on one core; fitting; a profile's size.

    OMP_NUM_THREADS=1 python benchmarks/pricing_speed.py DATA [--device h200-sxm] [--rows 30000] [--no-fit]

DATA is the folder with `kernels/`. Models of matrix products and of attention are fitted to the published tables of
one device; distinct calls are made of measured sizes in new combinations. "predict" is a model's own time, "price" is
`kernel_models.pricing.price`, which also groups calls, finds repeated ones and asks which model covers each. Errors are
those of the held-out fifth of shape groups. The last part fits one model to 300,000 calls, selection and all.

`--no-fit` takes less than a minute: models have as many trees and leaves, and so the same speed and nearly the same
size, but learn from a few thousand rows; their errors say nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from kernel_models.datasets.forms import read_table
from kernel_models.datasets.samples import Samples, joined
from kernel_models.device import DeviceSpec, device
from kernel_models.families.attention import attention
from kernel_models.families.gemm import gemm
from kernel_models.fitting import candidates_of, fit_entry, scaled_to
from kernel_models.learned.boosted import Intervals
from kernel_models.learned.fit import Problem
from kernel_models.op_call import Family, OpCall
from kernel_models.pricing import price
from kernel_models.profile import DeviceProfile, ProfileEntry, load_profile, save_profile
from kernel_models.scores import errors_of

RATE = 30_000
"""Calls a second that `price` is asked to price on one core."""
FIT_S, LOAD_S, MEGABYTES = 120, 0.2, 10
QUICK_ROWS = 4_000


def best(function: Callable[[], object], repeats: int = 3) -> float:
    """Seconds of the fastest run."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        function()
        times.append(time.perf_counter() - began)
    return min(times)


def distinct_calls(samples: Samples, number: int) -> list[OpCall]:
    """Calls nobody asked for before: measured sizes, recombined and moved a little."""
    random = np.random.default_rng(1)
    found: dict[OpCall, None] = {}
    dtype = samples.calls[0].dtype
    while len(found) < number:
        a, b = (samples.calls[i] for i in random.integers(len(samples), size=2))
        if samples.family is Family.GEMM:
            m = max(1, int(a.dims[1] * random.uniform(0.7, 1.0)))
            found.update(dict.fromkeys(gemm(1, m, b.dims[2], b.dims[3], dtype, "nt")))
        else:
            batch, length = a.dims[0], max(1, int(a.dims[3] * random.uniform(0.7, 1.0)))
            _, heads, kv_heads, _, _, width, _, window = b.dims
            found.update(dict.fromkeys(attention(b.kind, batch, heads, kv_heads, length, length, width, width,
                                                 dtype, causal=True, window=window)))
    return list(found)[:number]


def quick_entry(samples: Samples, spec: DeviceSpec) -> ProfileEntry:
    """A model of as many trees and leaves as a real one, from a few thousand rows, without any choice."""
    held = samples.split()
    fit = samples.taken(~held)
    few = fit.taken(np.sort(np.random.default_rng(0).permutation(len(fit))[:QUICK_ROWS]))
    problem = Problem.of(few, spec)
    how = candidates_of(samples.family, len(samples))[0]
    predicted, done, _ = problem.out_of_fold(how.scaled(0.1), folds=1)
    model = problem.model(scaled_to(how, len(samples)), Intervals.of(predicted[done], problem.measured_us[done]))
    judged = samples.taken(held)
    kept = judged.taken(np.asarray(model.covers(judged.calls), bool))
    facts = {"held_out": errors_of(model.predict(kept.calls).time_us, kept.measured_us).to_json()}
    return ProfileEntry("boosted", model, samples.software, len(few), facts)


def asked(measured: float, wanted: float, *, at_least: bool) -> str:
    """What was asked, and whether it is met."""
    fine = measured >= wanted if at_least else measured <= wanted
    return f"asked {'≥' if at_least else '≤'} {wanted:,g}: {'met' if fine else 'missed'}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--device", default="h200-sxm")
    parser.add_argument("--rows", type=int, default=30_000)
    parser.add_argument("--no-fit", action="store_true", help="small models, and no fit to 300,000 calls")
    options = parser.parse_args()
    spec = device(options.device)
    chosen = []
    for name in ("gemm_forward", "attention_forward_causal"):
        found = [one for one in read_table(options.data / "kernels" / f"{name}.parquet") if one.device == spec.name]
        chosen.append(max(found, key=lambda one: (one.calls[0].dtype == "bf16", one.software.startswith("vllm-0.24"),
                                                  len(one))).aggregated())
    entries = [quick_entry(one, spec) if options.no_fit else fit_entry(one, spec) for one in chosen]
    if options.no_fit:
        print(f"small models: real numbers of trees and leaves, fitted to {QUICK_ROWS:,} rows")
    profile = DeviceProfile(spec, entries)

    print(f"{'family':<10} {'predict, calls/s':>16} {'price, calls/s':>15} {'repeated, calls/s':>18} "
          f"{'held-out MAPE':>14} {'median':>7}  price, asked")
    for one, entry in zip(chosen, entries, strict=True):
        calls = distinct_calls(one, options.rows)
        model = profile.models_of(one.family)[0]
        model.predict(calls[:100])
        again = calls[:len(calls) // 10] * 100
        predicting = len(calls) / best(lambda m=model, c=calls: m.predict(c))
        pricing = len(calls) / best(lambda c=calls: price(c, spec, profile))
        repeating = len(again) / best(lambda c=again: price(c, spec, profile), 1)
        judged = entry.facts["held_out"]
        print(f"{one.family.value:<10} {predicting:>16,.0f} {pricing:>15,.0f} {repeating:>18,.0f} "
              f"{judged['mape'] * 100:>13.2f}% {judged['median'] * 100:>6.2f}%  "
              f"{asked(pricing, RATE, at_least=True)}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "speed.profile"
        save_profile(profile, path)
        load = best(lambda: load_profile(path), 5)
        size = path.stat().st_size / 1e6
        print(f"\nprofile of {len(entries)} models: {size:.2f} MB, "
              f"{asked(size, MEGABYTES, at_least=False)}; loads in {load:.3f} s, {asked(load, LOAD_S, at_least=False)}")
        cold = ("import time; b = time.perf_counter(); from kernel_models.profile import load_profile; "
                f"p = load_profile({str(path)!r}); print(time.perf_counter() - b)")
        run = subprocess.run([sys.executable, "-c", cold], capture_output=True, text=True, check=True, env=os.environ)
        print(f"first load of a process, imports included: {float(run.stdout):.2f} s")
    if not options.no_fit:
        every = joined(replace(one, software="all", held_out=None) for one in
                       read_table(options.data / "kernels" / "gemm_forward.parquet"))
        everything = replace(
            chosen[0], calls=[call for one in every for call in one.calls],
            measured_us=np.concatenate([one.measured_us for one in every]),
            groups={"site": [label for one in every for label in one.groups["site"]]})
        # Several devices' rows stand in for 300,000 of one: only the time counts.
        repeat = np.resize(np.arange(len(everything)), 300_000)
        large = everything.taken(repeat)
        began = time.perf_counter()
        fit_entry(large, spec)
        seconds = time.perf_counter() - began
        print(f"fit to {len(large):,} calls (choice, held-out errors): {seconds:.0f} s with "
              f"{os.environ.get('OMP_NUM_THREADS', 'all')} threads, {asked(seconds, FIT_S, at_least=False)}")


if __name__ == "__main__":
    main()
