"""Fit the default efficiencies, and how well they carry over to a device they were not fitted to.

    python benchmarks/default_efficiencies.py [DATA] [--write]

DATA is the folder with `kernels/` and `traces/`. Sources: the published tables (`kernel_tables.py`) and recorded
traces, which have the families no table has. The H100 and MI300X traces of `h100-vs-mi300` take no part: they are what
predictions from the data sheet are checked against. For every device in turn, efficiencies fitted to the others price
its calls; those residuals give the intervals. The last table is how many of a device's calls lie inside intervals made
from the other devices' residuals alone. `--write` writes kernel_models/heuristics/efficiencies.toml.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
from datasheet_traces import START, read_trace
from kernel_tables import table_sets

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.efficiency import (
    DEFAULTS_FILE,
    Efficiencies,
    Efficiency,
    Measured,
    default_efficiencies,
    fit_over_devices,
    keys,
    spread,
)
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.heuristics.work import CallTable
from kernel_models.op_call import Family, OpCall

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
ONE_DEVICE = 1.5
"""Intervals from residuals within one device are widened by this: devices differ by more than calls do."""
FEW = 12
"""Calls that a default of its own needs for a kind."""
LEAST_CALLS = 5
"""Calls of a family that a device needs to count for the least width of the family's intervals."""
STREAMING_COPY = ("of one type, side by side: the same streaming kernel as element-wise ones, whose rate is taken. "
                  "Recorded copies, which are slower where their unknown strides differ, give the interval's upper end")
_SET = "set, not measured: cuDNN's channels-last kernels on matrix units, of which no measurement is at hand"
SET = {f"conv/{dtype}": Efficiency(0.5, 0.7, 2.5, -0.8, 0.8, _SET) for dtype in ("fp16", "bf16", "tf32")}
"""Entries without a measurement."""
_SCALED = ("gemm_forward (h100-sxm, h200-sxm), without the casts timed with it: benchmarks/fp8_products.py. memory, "
           "fixed and interval: gemm/bf16")
SET |= {f"gemm/fp8/{kind}": Efficiency(0.742, 0.846, 2.17, -0.272, 0.24, _SCALED) for kind in ("grouped", "scaled")}
"""Products of fp8 tensors alone; the tables' linear layers (``mm``) cast their activations first."""
TRACES = ("rank3-of-8xA100-6steps/rank3.kineto.json.gz", "dlrm-8xV100-2023/rank0.kineto.json.gz",
          "resnet50-V100-2021/loader-workers-0.json.gz", "vllm-eager-B200/rank0.json.gz",
          "rank0-1-of-128/sampled_rank-0.json.gz", "triton-example/torch-compile-mi300.json.gz",
          "cuda-sync-A100/alexnet/benchmark_result_2869224_1695835535_trace.json.gz")


def trace_sets(data: Path) -> list[tuple[str, DeviceSpec, list[OpCall], np.ndarray]]:
    """Calls of the traces that may be fitted to, with their measured times."""
    found = []
    for name in TRACES:
        trace = read_trace(data / "traces" / name)
        if trace is not None:
            found.append((name.split("/")[0], trace.device, trace.calls, trace.measured_us))
    return found


def collect(data: Path) -> list[tuple[str, Measured]]:
    """Every set, by the table's or trace's name; without attention on boards with GDDR, which corrections price."""
    sets = [(one.table, Measured(one.calls, one.measured_us, one.device)) for one in table_sets(data)
            if not (one.table == "attention_forward" and one.device.memory_kind.startswith("GDDR"))]
    return sets + [(f"trace {name}", Measured(calls, times, device)) for name, device, calls, times in trace_sets(data)]


def chains(calls: list[OpCall]) -> list[tuple[str, ...]]:
    """The keys of every call."""
    found: list[tuple[str, ...]] = [()] * len(calls)
    for family in {call.family for call in calls}:
        at = [i for i, call in enumerate(calls) if call.family == family]
        table = CallTable.of(family, [calls[i] for i in at])
        for i, group in zip(at, table.group, strict=True):
            kind, dtype = table.groups[group]
            found[i] = keys(family, dtype, kind)
    return found


def residuals_elsewhere(sets: list[tuple[str, Measured]]) -> dict[str, list[np.ndarray]]:
    """Log residuals by key and device, of calls priced with efficiencies fitted to the other devices."""
    found: dict[str, list[np.ndarray]] = {}
    for name in dict.fromkeys(one.device.name for _, one in sets):
        others = fit_over_devices([one for _, one in sets if one.device.name != name], base=START)
        mine: dict[str, list[float]] = {}
        for _, one in sets:
            if one.device.name != name:
                continue
            for family in Family:
                rows = [i for i, call in enumerate(one.calls) if call.family == family and "unsized" not in call.flags
                        and one.measured_us[i] > 0]
                if not rows or family.value not in others.families():
                    continue
                calls = [one.calls[i] for i in rows]
                log = np.log(np.asarray(one.measured_us, float)[rows]) - np.log(
                    RooflineModel(family, one.device, others).predict(calls).time_us)
                for chain, residual in zip(chains(calls), log, strict=True):
                    for key in chain:
                        mine.setdefault(key, []).append(float(residual))
        for key, values in mine.items():
            found.setdefault(key, []).append(np.array(values))
    return found


def defaults(sets: list[tuple[str, Measured]]) -> tuple[Efficiencies, dict[str, list[np.ndarray]]]:
    """Efficiencies fitted to everything, with intervals of devices left out."""
    elsewhere = residuals_elsewhere(sets)
    fitted = fit_over_devices([one for _, one in sets], base=START)
    names, counts = {}, {}
    for name, one in sets:
        for chain in chains(list(set(one.calls))):
            for key in chain:
                names.setdefault(key, {}).setdefault(name, {})[one.device.name] = None
                counts[key] = counts.get(key, 0) + 1
    entries = {}
    for key, entry in sorted(fitted.entries.items()):
        parts = key.split("/")
        if len(parts) == 3 and counts.get(key, 0) < FEW:
            continue
        residuals = elsewhere.get(key, [])
        if len(residuals) >= 2:
            weight = np.concatenate([np.full(len(r), 1 / len(r)) for r in residuals])
            low, high = spread(np.concatenate(residuals), weight)
            note = f"interval: {len(residuals)} devices, each left out"
        else:
            low, high = entry.low * ONE_DEVICE, entry.high * ONE_DEVICE
            note = f"interval: one device, widened {ONE_DEVICE} times"
        source = "; ".join(f"{name} ({', '.join(devices)})" for name, devices in names.get(key, {}).items())
        entries[key] = replace(entry, low=low, high=high, source=f"{source}. {note}" if source else entry.source)
    everything = [r for key, rs in elsewhere.items() if "/" not in key for r in rs]
    weight = np.concatenate([np.full(len(r), 1 / len(r)) for r in everything])
    low, high = spread(np.concatenate(everything), weight)
    typical = {name: float(np.median([getattr(entries[f.value], name) for f in Family if f.value in entries]))
               for name in ("compute", "memory", "fixed")}
    entries["*"] = Efficiency(**typical, low=low * ONE_DEVICE, high=high * ONE_DEVICE,
                              source="medians of the families below; their interval widened 1.5 times")
    as_element_wise(entries)
    all_alike(entries)
    return Efficiencies({**entries, **SET}, least=least_widths(elsewhere)), elsewhere


def as_element_wise(entries: dict[str, Efficiency]) -> None:
    """Give contiguous copies within a type the rate of element-wise kernels: both stream whole tensors."""
    copies = entries.get("copy//copy")
    if copies is None or "elementwise" not in entries:
        return
    for key in [key for key in entries if key.startswith("copy/") and key.endswith("/copy")]:
        del entries[key]
    memory = entries["elementwise"].memory
    slower = float(np.log(memory / copies.memory))
    entries["copy//copy"] = replace(copies, memory=memory, low=-abs(entries["elementwise"].low),
                                    high=max(copies.high, slower), source=STREAMING_COPY)


def all_alike(entries: dict[str, Efficiency]) -> None:
    """Leave one entry to all attention: what kinds, and a cache, differ by is told by the formula, relative to it."""
    for key in [key for key in entries if key.startswith("attention/")]:
        del entries[key]


def least_widths(elsewhere: dict[str, list[np.ndarray]]) -> dict[str, float]:
    """By family, the median over devices left out of the width that covers 80% of each one's calls, log."""
    found = {}
    for family in Family:
        widths = [float(np.quantile(np.abs(r), 0.8)) for r in elsewhere.get(family.value, []) if len(r) >= LEAST_CALLS]
        if len(widths) >= 2:
            found[family.value] = float(np.median(widths))
    return found


def coverage_elsewhere(elsewhere: dict[str, list[np.ndarray]]) -> dict[str, list[float]]:
    """By family, the share of each device's calls inside the 80% intervals that the other devices would give them.

    ``elsewhere`` are residuals of devices left out of the fit; a device's own take no part in its interval here, which
    is made as ``defaults`` makes those that are stored: quantiles of the others', no narrower than the least width.
    """
    found = {}
    for family in Family:
        all_of_them = [r for r in elsewhere.get(family.value, []) if len(r) >= LEAST_CALLS]
        if len(all_of_them) < 3:
            continue
        shares = []
        for i, mine in enumerate(all_of_them):
            others = all_of_them[:i] + all_of_them[i + 1:]
            weight = np.concatenate([np.full(len(r), 1 / len(r)) for r in others])
            low, high = spread(np.concatenate(others), weight)
            least = float(np.median([np.quantile(np.abs(r), 0.8) for r in others]))
            shares.append(float(((mine >= min(low, -least)) & (mine <= max(high, least))).mean()))
        found[family.value] = shares
    return found


def written(efficiencies: Efficiencies, by: str = "benchmarks/default_efficiencies.py") -> str:
    """The file's text."""
    lines = [f"# Default efficiencies, written by {by}; do not edit by hand.",
             "# compute, memory: shares of what a device sustains; fixed: kernel floors; low, high: log 80% interval.",
             "", "[entries]"]
    for key, e in efficiencies.entries.items():
        source = e.source.replace('"', "'")
        lines.append(f'"{key}" = {{ compute = {e.compute:.3f}, memory = {e.memory:.3f}, fixed = {e.fixed:.3f}, '
                     f'low = {e.low:.3f}, high = {e.high:.3f}, source = "{source}" }}')
    lines += ["", "# Least log half widths of intervals by family: the median over devices, each left out of the fit,",
              "# of the width that covers 80% of its calls.", "[least]"]
    lines += [f"{family} = {width:.3f}" for family, width in sorted(efficiencies.least.items())]
    return "\n".join(lines) + "\n"


def of_family(one: Measured, family: str) -> Measured:
    """A set's calls of one family."""
    rows = [i for i, call in enumerate(one.calls) if call.family.value == family]
    return replace(one, calls=[one.calls[i] for i in rows], measured_us=np.asarray(one.measured_us, float)[rows])


def beside_stored(found: Efficiencies, family: str) -> Efficiencies:
    """The stored defaults with one family's entries replaced."""
    stored = default_efficiencies()
    mine = {key: entry for key, entry in found.entries.items() if key.split("/")[0] == family}
    entries: dict[str, Efficiency] = {}
    for key, entry in stored.entries.items():
        entries.update(mine if key.split("/")[0] == family else {key: entry})
    return Efficiencies({**entries, **mine},
                        least={**stored.least, **{f: width for f, width in found.least.items() if f == family}})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", metavar="FAMILY", help="fit this family alone; the others stay as they are stored")
    arguments = parser.parse_args()
    sets = collect(arguments.data)
    if arguments.only:
        chosen = [(name, of_family(one, arguments.only)) for name, one in sets]
        sets = [(name, one) for name, one in chosen if one.calls]
    result, elsewhere = defaults(sets)
    if arguments.only:
        result = beside_stored(result, arguments.only)
    print(f"{'key':30}{'devices':>8}{'calls':>8}{'compute':>9}{'memory':>9}{'fixed':>8}{'low':>8}{'high':>8}"
          f"{'median |error| on a device left out':>38}")
    for key, e in result.entries.items():
        residuals = elsewhere.get(key, [])
        count = sum(len(r) for r in residuals)
        errors = " ".join(f"{np.median(np.abs(np.expm1(-r))):.0%}" for r in residuals)
        print(f"{key:30}{len(residuals):8}{count:8}{e.compute:9.2f}{e.memory:9.2f}{e.fixed:8.2f}"
              f"{np.expm1(e.low):8.0%}{np.expm1(e.high):8.0%}   {errors}")
    print("\ncalls inside the 80% interval of the other devices, by device (each left out of fit and interval)")
    for family, shares in coverage_elsewhere(elsewhere).items():
        print(f"{family:14} mean {np.mean(shares):4.0%}  " + " ".join(f"{share:.0%}" for share in sorted(shares)))
    if arguments.write:
        DEFAULTS_FILE.write_text(written(result), encoding="utf-8")
        print(f"wrote {DEFAULTS_FILE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
