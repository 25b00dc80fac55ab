"""A zoo of image models: every architecture of timm traced by shapes, and its step priced on GPUs that ran it.

    python benchmarks/zoo.py trace CACHE [--kind train] [--part 0/2]    # once; needs timm, hours of one core
    python benchmarks/zoo.py judge CACHE [--cases FILE]                 # families, and a GPU, left out
    python benchmarks/zoo.py fit   CACHE                                # judges, then writes what foretrace ships
    python benchmarks/zoo.py speed CACHE                                # pricing what was traced

The table of measured steps is timm_step_times.parquet (pytorch-image-models, Apache-2.0) in DATA/end_to_end; kernels
come from the tables of `kernel_tables.py` and the alignment sweeps (EleutherAI cookbook) in DATA/kernels. Families are
timm's modules; five folds of whole families, by the hash of their names. Nothing of a judged row's family was fitted.
"""

from __future__ import annotations

import argparse
import gzip
import os
import time
from pathlib import Path

import msgspec
import numpy as np
import pandas as pd
from zoo_parts.cases import FOLDS, kernel_cases, read_table, steps_of
from zoo_parts.tracing import programs_of, trace_all

from kernel_models.heuristics.corrections import SHIPPED_FILE
from kernel_models.pricing import price
from kernel_models.spreads import END
from kernel_models.step_fit import StepProblem, fit_widths

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
GPUS = ("rtx3090", "rtx4090")
LEAST_WIDTH = 0.01
"""Standard deviation of what a step measured again differs by, as a logarithm."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("trace", "judge", "fit", "speed"))
    parser.add_argument("cache", type=Path)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--kind", choices=("train", "infer"))
    parser.add_argument("--part", default="0/1", help="the how manieth of how many parts to trace")
    parser.add_argument("--cases", type=Path, help="where to write every case")
    given = parser.parse_args()
    if given.what == "trace":
        table = read_table(given.data)
        first, parts = map(int, given.part.split("/"))
        some = table[table.kind == given.kind] if given.kind else table
        trace_all(programs_of(some)[first::parts], given.cache)
        return
    table = read_table(given.data)
    rows, steps = steps_of(table[~table.compiled], given.cache)
    print(f"{len(rows):,} steps of {rows.architecture.nunique()} architectures in {rows.family.nunique()} families; "
          f"the table has {table[~table.compiled].architecture.nunique()} architectures")
    if given.what == "speed":
        speed(rows, steps)
        return
    kernels, measured = kernel_cases(given.data)
    problem = StepProblem([*steps, *measured])
    judged = judge(problem, rows, kernels)
    if given.cases:
        judged.to_csv(given.cases, index=False)
    if given.what == "fit":
        write(problem, judged, len(rows))


def judge(problem: StepProblem, rows: pd.DataFrame, kernels: pd.DataFrame) -> pd.DataFrame:
    """Steps priced by what was fitted to the other families (and kernels of other sizes), with tables printed."""
    n, every = len(rows), np.arange(len(problem.steps))
    folds = np.concatenate([rows.fold.to_numpy(), kernels.fold.to_numpy()])
    start = problem.times_us(np.zeros(len(problem.weights)))
    found, shares = np.zeros(len(folds)), None
    for fold in range(FOLDS):
        values = problem.fit(every[folds != fold])
        mine = folds == fold
        found[mine] = problem.times_us(values)[mine]
        families, times = problem.family_times_us(values)
        shares = np.zeros_like(times) if shares is None else shares
        shares[mine] = (times / times.sum(axis=1, keepdims=True))[mine]
    judged = _with_intervals(rows, found[:n], shares[:n], families)
    judged["as_before_ms"] = start[:n] / 1e3
    print("\nFamilies of models left out (before: the data sheet alone)")
    _print(judged, ["kind", "gpu", "layout"])
    _print(judged, ["kind", "gpu"])
    print("\nBy version of PyTorch")
    _print(judged, ["kind", "gpu", "layout", "torch"])
    print("\nBy family")
    _print(judged, ["kind", "family"])
    print("\nBy size (billions of multiply-adds an image)")
    judged["size"] = pd.cut(judged.gmacs, (0, 0.5, 2, 5, 15, 1e4)).astype(str)
    _print(judged, ["kind", "size"])
    print("\nA GPU left out wholly, and families left out too")
    for known, asked in (GPUS, GPUS[::-1]):
        _left_out(problem, rows, shares[:n], families, known, asked)
    print("\nKernels of a device that was left out wholly, fitted to those of all others: MAPE and bias before and now")
    _unseen(problem, kernels)
    print("\nKernels of the tables, sizes left out: MAPE and bias before and now; order of one sweep (Spearman)")
    kernels = kernels.assign(before=start[n:], now=found[n:])
    for name, one in kernels.groupby("table"):
        before, now = (one[column] / one.true_us - 1 for column in ("before", "now"))
        print(f"  {name:<42}{len(one):>6} {100 * before.abs().mean():>6.1f} {100 * before.mean():>+6.1f}   "
              f"{100 * now.abs().mean():>6.1f} {100 * now.mean():>+6.1f}   "
              + " ".join(f"{column.corr(one.true_us, method='spearman'):.3f}" for column in (one.before, one.now)))
    return judged


def _left_out(problem: StepProblem, rows: pd.DataFrame, shares: np.ndarray, families: list[str], known: str, asked: str,
              ) -> None:
    n = len(rows)
    kernels = np.arange(n, len(problem.steps))
    judged = np.full(n, np.nan)
    for fold in range(FOLDS):
        mine = np.flatnonzero(((rows.gpu == known) & (rows.fold != fold)).to_numpy())
        values = problem.fit(np.concatenate([mine, kernels]))
        there = ((rows.gpu == asked) & (rows.fold == fold)).to_numpy()
        judged[there] = problem.times_us(values)[:n][there]
    some = np.isfinite(judged)
    frame = _with_intervals(rows[some].reset_index(drop=True), judged[some], shares[some], families)
    print(f"  fitted on {known}, asked for {asked}; order of the models (Spearman) "
          f"{(frame.predicted_ms / frame.batch).corr(frame.step_ms / frame.batch, method='spearman'):.3f}")
    _print(frame, ["kind", "gpu"])


def _unseen(problem: StepProblem, kernels: pd.DataFrame) -> None:
    """Print how well kernels of each device are priced by what those of the others teach."""
    n = len(problem.steps) - len(kernels)
    start = problem.times_us(np.zeros(len(problem.weights)))[n:]
    # What was launched from Python one by one is no kernel's time.
    sound = (kernels.weight > 0).to_numpy()
    for name in sorted(set(kernels.device)):
        mine = (kernels.device == name).to_numpy()
        now = problem.times_us(problem.fit(n + np.flatnonzero(~mine)))[n:]
        some = mine & sound
        before, after = (times[some] / kernels.true_us[some] - 1 for times in (start, now))
        print(f"  {name:<42}{some.sum():>6} {100 * before.abs().mean():>6.1f} {100 * before.mean():>+6.1f}   "
              f"{100 * after.abs().mean():>6.1f} {100 * after.mean():>+6.1f}")


def _with_intervals(rows: pd.DataFrame, predicted_us: np.ndarray, shares: np.ndarray, families: list[str],
                    ) -> pd.DataFrame:
    """Rows with predictions, and intervals whose widths come from the errors of the other folds."""
    frame = rows.assign(predicted_ms=predicted_us / 1e3)
    error = np.log(frame.predicted_ms / frame.step_ms).to_numpy()
    width = np.zeros(len(frame))
    for fold in range(FOLDS):
        mine = (frame.fold == fold).to_numpy()
        widths = fit_widths(shares[~mine], error[~mine], families)
        width[mine] = np.sqrt((shares[mine] ** 2) @ np.square([widths[name] for name in families]) + LEAST_WIDTH**2)
    return frame.assign(low_ms=frame.predicted_ms * np.exp(-END * width),
                        high_ms=frame.predicted_ms * np.exp(END * width))


def _print(frame: pd.DataFrame, by: list[str]) -> None:
    before = "as_before_ms" in frame
    print(f"  {'':<34}{'n':>6}{'MAPE':>7}{'median':>8}{'bias':>7}{'p90':>7}{'max':>7}{'inside':>8}"
          + (f"{'MAPE':>8}{'bias':>7} before" if before else ""))
    for name, one in frame.groupby(by):
        error = one.predicted_ms / one.step_ms - 1
        inside = (one.low_ms <= one.step_ms) & (one.step_ms <= one.high_ms)
        size = error.abs()
        line = (f"  {' '.join(map(str, name)):<34}{len(one):>6}{100 * size.mean():>7.1f}{100 * size.median():>8.1f}"
                f"{100 * error.mean():>+7.1f}{100 * size.quantile(0.9):>7.1f}{100 * size.max():>7.0f}"
                f"{100 * inside.mean():>7.0f}%")
        if before:
            old = one.as_before_ms / one.step_ms - 1
            line += f"{100 * old.abs().mean():>8.1f}{100 * old.mean():>+7.1f}"
        print(line)


def write(problem: StepProblem, judged: pd.DataFrame, steps: int) -> None:
    """Fit to everything and write what foretrace ships, with widths from the errors of families left out."""
    values = problem.fit()
    families, times = problem.family_times_us(values)
    shares = (times / times.sum(axis=1, keepdims=True))[:steps]
    widths = fit_widths(shares, np.log(judged.predicted_ms / judged.step_ms).to_numpy(), families)
    error = (judged.predicted_ms / judged.step_ms - 1).abs()
    source = (f"{steps} steps of {judged.architecture.nunique()} image models (timm) on RTX 3090 and 4090, and kernels "
              f"of the published tables; families left out: MAPE {100 * error.mean():.1f}%, "
              f"median {100 * error.median():.1f}%")
    corrections = problem.corrections(values, widths=widths, source=source)
    content = gzip.compress(msgspec.json.encode(corrections.to_json()), 9, mtime=0)
    SHIPPED_FILE.write_bytes(content)
    print(f"\nWrote {SHIPPED_FILE.name}: {len(corrections.points):,} numbers, {len(corrections.curves):,} curves, "
          f"{len(content) / 1e3:,.0f} kB\n{source}\nwidths: "
          + ", ".join(f"{name} {width:.2f}" for name, width in widths.items()))


def speed(rows: pd.DataFrame, steps: list) -> None:
    """Price every model once, calls at hand."""
    first = rows.drop_duplicates(["kind", "architecture", "image"]).index.tolist()
    begin = time.perf_counter()
    for i in first:
        price(list(steps[i].calls), steps[i].device)
    took = time.perf_counter() - begin
    print(f"{len(first)} models priced in {took:.1f} s: 1,000 in {1000 * took / len(first):.1f} s")


if __name__ == "__main__":
    main()
