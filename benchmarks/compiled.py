"""torch.compile judged on pairs of steps: image models of timm, eager and compiled, on an RTX 4090.

    python benchmarks/compiled.py trace CACHE [--models 60]     # once; needs timm, some seconds a model
    python benchmarks/compiled.py judge CACHE [--cases FILE]

The table of measured steps is timm_step_times.parquet (pytorch-image-models, Apache-2.0) in DATA/end_to_end: inference
in mixed precision, contiguous layout, PyTorch 2.4 and 2.9. Models are taken in the order of a hash of the
architecture's name; families are timm's modules. Nothing of the edit is fitted; families of which a model
was looked at while it was written are shown apart.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
from zoo_parts import tracing
from zoo_parts.cases import read_table
from zoo_parts.ordered import Ordered, ordered_of
from zoo_parts.programs import Program, merges, trace_graph
from zoo_parts.tracing import program_of

from graph_predictor.edits.compile import compiled
from graph_predictor.prediction.interval import ActiveErrors, FamilyRows
from graph_predictor.prediction.pricing import KernelTimes, prices_of
from graph_predictor.prediction.rewriting import ratios_of
from graph_predictor.prediction.scenario import WorkUnits
from kernel_models.device import DeviceSpec, device
from kernel_models.op_call import OpCall
from kernel_models.pricing import price
from kernel_models.spreads import COMPILED_KERNELS
from kernel_models.trace_calls import FAMILIES
from tracer.graph import Phase

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
LOOKED_AT = 42
"""Architectures whose errors were looked at while the edit was written; a family of one of them is not left out."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trace", "judge"))
    parser.add_argument("cache", type=Path)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--models", type=int, default=60, help="architectures to trace")
    parser.add_argument("--cases", type=Path, help="where to write every case")
    given = parser.parse_args()
    pairs = pairs_of(read_table(given.data))
    if given.what == "trace":
        trace_all(pairs, given.cache, given.models)
        return
    judged = judge(pairs, given.cache)
    show(judged)
    if given.cases:
        judged.to_csv(given.cases, index=False)


def pairs_of(table: pd.DataFrame) -> pd.DataFrame:
    """One row an architecture and version: eager and compiled milliseconds an image, and their batches."""
    some = table[(table.kind == "infer") & (table.gpu == "rtx4090") & (table.layout == "nchw")]
    some = some.assign(image_ms=some.step_ms / some.batch)
    keys = ["model", "architecture", "family", "fold", "image", "torch", "kind", "layout", "precision", "gpu"]
    eager, compiled = (some[some.compiled == now].drop_duplicates(keys)[[*keys, "batch", "image_ms"]] for now in
                       (False, True))
    pairs = eager.merge(compiled, on=keys, suffixes=("_eager", "_compiled"))
    pairs["ratio"] = pairs.image_ms_compiled / pairs.image_ms_eager
    order = [hashlib.sha256(name.encode()).hexdigest() for name in pairs.architecture]
    ordered = pairs.assign(order=order).sort_values(["order", "image", "torch"])
    return ordered.drop_duplicates(["architecture", "torch"]).reset_index(drop=True)


def judge(pairs: pd.DataFrame, cache: Path) -> pd.DataFrame:
    """The pairs of which a trace is at hand, with what the edit predicts of each."""
    spec = device("rtx-4090")
    kept, found = [], []
    for row in pairs.itertuples():
        path = cache / f"{program_of(row).stem}.json.gz"
        if not path.exists():
            continue
        steps = Ordered.load(path)
        kept.append(row.Index)
        eager = price([call for calls in steps.calls(int(row.batch_eager)) for call in calls], spec).total_us
        compiled_us, low, high = compiled_step(steps.calls(int(row.batch_compiled)), spec)
        ratio = compiled_us / row.batch_compiled / (eager / row.batch_eager)
        found.append((eager / row.batch_eager / 1e3, compiled_us / row.batch_compiled / 1e3, ratio, ratio * np.exp(low),
                      ratio * np.exp(high)))
        if len(found) % 50 == 0:
            print(f"{len(found)} pairs", flush=True)
    columns = ["predicted_eager_ms", "predicted_compiled_ms", "predicted", "low", "high"]
    return pairs.loc[kept].reset_index(drop=True).join(pd.DataFrame(found, columns=columns))


def compiled_step(calls: list[tuple[OpCall, ...]], spec: DeviceSpec) -> tuple[float, float, float]:
    """A step's time after the edit, µs, and the logs of the 80% interval's ends where the time before is known.

    The interval is put together as a prediction's is: each replacement's as ``prediction.rewriting`` has it, beside
    the edit's own, and those of families in quadrature (``prediction.interval.ActiveErrors``).
    """
    n = len(calls)
    one, none = np.ones(n, np.int64), np.zeros(n, np.int64)
    units = WorkUnits(rank=none, lane=none, row=np.arange(n), op=np.arange(n), phase=np.full(n, int(Phase.FORWARD)),
                  step=none, start=np.arange(n), kernels=one, follows=np.ones(n, np.bool_),
                  watched=np.zeros(n, np.bool_), calls=list(calls), alive=np.ones(n, np.bool_), on_host=False)
    found = compiled(None, units).replacements
    before = [tuple(call for u in one.units.tolist() for call in calls[u]) for one in found]
    _, low, high = ratios_of(before, [one.calls for one in found], spec)
    for one in found:
        one.carry_out(units)
    alive = np.flatnonzero(units.alive)
    us = prices_of([units.calls[u] for u in alive.tolist()], spec, None).time_us
    ends = np.full((2, n), COMPILED_KERNELS)
    for number, one in enumerate(found):
        ends[:, one.units[0]] = max(COMPILED_KERNELS, -low[number]), max(COMPILED_KERNELS, high[number])
    family = np.array([FAMILIES.index(units.calls[u][0].family) for u in alive.tolist()])
    times = KernelTimes(us, none, family, -ends[0, alive], ends[1, alive], ())
    below, above = ActiveErrors.of(times, us, FamilyRows.of(family)).interval(float(us.sum()), 0.0)
    return float(us.sum()), float(np.log(below / us.sum())), float(np.log(above / us.sum()))


def show(judged: pd.DataFrame) -> None:
    """Print the errors."""
    print(f"{judged.architecture.nunique()} architectures of {judged.family.nunique()} families")
    size = pd.cut(judged.image_ms_eager * 1e3, (0, 200, 500, 1000, 3000, 1e6)).astype(str)
    same = np.where(judged.batch_eager == judged.batch_compiled, "equal batches", "other batches")
    looked = np.where(judged.family.isin(judged.family[judged.order.isin(judged.order.unique()[:LOOKED_AT])]),
                      "families looked at", "families not looked at")
    judged = judged.assign(all="all", same=same, looked=looked, size=size)
    print(f"  {'':<34}{'n':>6}{'ratio':>7}{'MAPE':>7}{'median':>8}{'bias':>7}{'p90':>7}{'max':>7}"
          f"{'inside':>8}{'width':>7}")
    for by in ("all", "looked", "same", "torch", "size", "family"):
        for name, one in judged.groupby(by):
            error = one.predicted / one.ratio - 1
            inside = (one.low <= one.ratio) & (one.ratio <= one.high)
            size = error.abs()
            print(f"  {name:<34}{len(one):>6}{one.ratio.median():>7.2f}{100 * size.mean():>7.1f}"
                  f"{100 * size.median():>8.1f}{100 * error.mean():>+7.1f}{100 * size.quantile(0.9):>7.1f}"
                  f"{100 * size.max():>7.0f}{100 * inside.mean():>7.0f}%"
                  f"{np.median(np.log(one.high / one.low)) / 2:>7.2f}")
        print()


def trace_all(pairs: pd.DataFrame, cache: Path, models: int) -> None:
    """Trace what was not traced yet, and say how each went."""
    chosen = pairs[pairs.architecture.isin(pairs.architecture.drop_duplicates()[:models])]
    programs = {(program := program_of(row)).stem: program for row in chosen.itertuples()}
    tracing.trace_all(list(programs.values()), cache,
                      lambda program: ordered_of(trace_graph(program, "rtx-4090")), _unmerged)


def _unmerged(program: Program, cache: Path) -> Path | None:
    """The file of a model without branches to merge, traced as it stands."""
    path = cache / f"{replace(program, merged=False).stem}.json.gz"
    return path if program.merged and path.exists() and not merges(program) else None


if __name__ == "__main__":
    main()
