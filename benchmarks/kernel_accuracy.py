"""How wrong the learned kernel models are on held-out shapes of the published tables, with the targets beside it.

    python benchmarks/kernel_accuracy.py DATA [--family gemm|attention|blocks] [--device NAME] [--csv FOLDER]

DATA is the folder with `kernels/`. Matrix products: a fifth of the (n, k) sites is held out, by the hash of their
label (`kernel_models.datasets.samples.is_held_out`), the same in every device's and stack's data. Attention: likewise a
fifth of the head configurations, then a fifth of the (batch, length) pairs. Transformer blocks: each model in turn.
Nothing was chosen on these rows. `--csv` writes every case. One model for each device, stack and kernel; errors in
percent.
"""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from kernel_models.datasets.samples import Samples
from kernel_models.datasets.tables import read_table
from kernel_models.device import device
from kernel_models.fitting import FEW_GROUPS, OTHERS, candidates_of, each_left_out, scaled_to
from kernel_models.heuristics.efficiency import fit_efficiencies
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.learned.boosted import BoostedModel, Intervals
from kernel_models.learned.fit import Problem
from kernel_models.op_call import Family
from kernel_models.scores import Errors, errors_of

GEMM_TARGETS = {("h200-sxm", "bf16"): (2.0, 3.3), ("h100-sxm", "bf16"): (2.0, 3.3),
                ("a100-sxm-80g", "bf16"): (2.7, 4.2), ("l40s", "bf16"): (4.0, 6.5), ("h200-sxm", "fp8"): (1.7, 2.8)}
"""Median and MAPE, percent."""
TITLE = (f"{'device':<13} {'software':<46} {'held out':<12} {'n':>6} {'MAPE':>6} {'median':>6} {'bias':>6} {'p90':>6} "
         f"{'max':>7} {'cover':>6}  target")


def fitted(samples: Samples, grouping: str = "") -> BoostedModel:
    """A model of all samples; intervals from one fold that trees of the others predicted.

    Where groups are few, each one is left out in turn, as ``foretrace fit`` does.
    """
    how = (candidates_of(samples.family, len(samples)) or OTHERS)[0]
    labels = samples.labels(grouping)
    problem = each_left_out(Problem.of(samples, device(samples.device), grouping), labels)
    few = len(set(labels)) <= FEW_GROUPS
    predicted, done, members = problem.out_of_fold(how.scaled(0.3), folds=FEW_GROUPS if few else 1)
    if not done.any():
        predicted, done, members = problem.out_of_fold(how.scaled(0.3))
    how = replace(how, members=members)
    return problem.model(scaled_to(how, len(samples)), Intervals.of(predicted[done], problem.measured_us[done]))


def show(one: Samples, what: str, errors: Errors, target: tuple[float | None, float] | None, seconds: float) -> None:
    """Print a line of the table."""
    text = ""
    if target is not None:
        median, mape = target
        fine = errors.mape * 100 <= mape and (median is None or errors.median * 100 <= median)
        text = f"{'' if median is None else f'median {median} '}MAPE {mape} {'met' if fine else 'missed'}"
    cover = "" if errors.coverage is None else f"{errors.coverage * 100:.0f}%"
    print(f"{one.device:<13} {one.software:<46} {what:<12} {errors.n:>6} {errors.mape * 100:>6.2f} "
          f"{errors.median * 100:>6.2f} {errors.bias * 100:>+6.2f} {errors.p90 * 100:>6.2f} {errors.max * 100:>7.1f} "
          f"{cover:>6}  {text} ({seconds:.0f} s)", flush=True)


class Cases:
    """Every held-out case, to a CSV file."""

    def __init__(self, folder: Path | None, name: str) -> None:
        self._path = None if folder is None else folder / f"{name}.csv"
        if self._path:
            self._write("w", [["device", "software", "held_out", "group", "kind", "dtype", "dims", "flags",
                               "measured_us", "predicted_us", "low_us", "high_us"]])

    def _write(self, mode: str, rows: Iterable[list[str]]) -> None:
        assert self._path is not None
        with open(self._path, mode, newline="", encoding="utf-8") as stream:
            csv.writer(stream).writerows(rows)

    def add(self, held: Samples, what: str, labels: list[str], predicted: np.ndarray, low: np.ndarray,
            high: np.ndarray) -> None:
        """Write the cases of one table row."""
        if not self._path:
            return
        times = zip(held.measured_us, predicted, low, high, strict=True)
        self._write("a", ([held.device, held.software, what, label, call.kind, call.dtype,
                           "x".join(map(str, call.dims)), " ".join(call.flags), *(f"{time:.4f}" for time in row)]
                          for call, label, row in zip(held.calls, labels, times, strict=True)))


def held_out(samples: list[Samples], groupings: tuple[str, ...], name: str, folder: Path | None) -> None:
    """A fifth of the groups of each grouping held out."""
    print(f"\n{TITLE}")
    cases = Cases(folder, name)
    for one in samples:
        for grouping in groupings:
            began = time.perf_counter()
            out = one.split(grouping)
            fit, held = one.taken(~out), one.taken(out)
            if len(held) < 20 or len(fit) < 100:
                continue
            times = fitted(fit, grouping).predict(held.calls)
            errors = errors_of(times.time_us, held.measured_us, times.low_us, times.high_us)
            if one.family is Family.GEMM:
                target = GEMM_TARGETS.get((one.device, one.calls[0].dtype))
            else:
                target = (2.5, 6.0 if one.device == "l40s" else 4.5)
            show(one, grouping, errors, target, time.perf_counter() - began)
            cases.add(held, grouping, list(held.labels(grouping)), times.time_us, times.low_us, times.high_us)


def blocks(samples: list[Samples], folder: Path | None) -> None:
    """Each model left out in turn, over all operations of a device."""
    print(f"\n{TITLE}")
    cases = Cases(folder, "blocks")
    pooled: list[np.ndarray] = []
    for name in sorted({one.device for one in samples}):
        mine = [one for one in samples if one.device == name]
        of_device: list[np.ndarray] = []
        for model in sorted({label for one in mine for label in one.labels("model")}):
            began, found = time.perf_counter(), []
            for one in mine:
                found += list(_one_left_out(one, model, cases))
            numbers = np.concatenate(found, axis=1)
            _line(mine[0], model, numbers, None, time.perf_counter() - began)
            of_device.append(numbers)
        everything = np.concatenate(of_device, axis=1)
        pooled.append(everything)
        _line(mine[0], "all models", everything, 6.0, 0.0)
        _line(mine[0], "≥ 20 µs", everything[:, everything[0] >= 20], 4.0, 0.0)
    everything = np.concatenate(pooled, axis=1)
    anywhere = replace(samples[0], device="all")
    _line(anywhere, "all models", everything, 6.0, 0.0)
    _line(anywhere, "≥ 20 µs", everything[:, everything[0] >= 20], 4.0, 0.0)


def _line(one: Samples, what: str, numbers: np.ndarray, target: float | None, seconds: float) -> None:
    measured, predicted, low, high = numbers
    show(replace(one, software="vidur, every operation"), what, errors_of(predicted, measured, low, high),
         None if target is None else (None, target), seconds)


def _one_left_out(one: Samples, model: str, cases: Cases) -> Iterator[np.ndarray]:
    """Measured, predicted, low and high of a model's calls, [4, n]; formulas where its kind of call was never seen."""
    out = np.array([label == model for label in one.labels("model")])
    if not out.any() or out.all():
        return
    fit, held = one.taken(~out).aggregated(), one.taken(out).aggregated()
    learned = fitted(fit, "model")
    covered = learned.covers(held.calls)
    for rows, pricing in ((covered, learned), (~covered, None)):
        if not rows.any():
            continue
        part = held.taken(rows)
        if pricing is None:
            spec = device(one.device)
            some = fit.taken(np.random.default_rng(0).permutation(len(fit))[:1500])
            pricing = RooflineModel(one.family, spec, fit_efficiencies(some.calls, some.measured_us, spec))
        times = pricing.predict(part.calls)
        cases.add(part, model, list(part.labels("model")), times.time_us, times.low_us, times.high_us)
        yield np.array([part.measured_us, times.time_us, times.low_us, times.high_us])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--family", choices=("gemm", "attention", "blocks"))
    parser.add_argument("--device", default="", help="only this device")
    parser.add_argument("--csv", type=Path, help="folder to write every case to")
    options = parser.parse_args()
    if options.csv:
        options.csv.mkdir(parents=True, exist_ok=True)

    def samples(name: str) -> list[Samples]:
        found = read_table(options.data / "kernels" / f"{name}.parquet")
        return [one for one in found if options.device in ("", one.device)]

    if options.family in (None, "gemm"):
        held_out([one.aggregated() for one in samples("gemm_forward")], ("site",), "gemm", options.csv)
    if options.family in (None, "attention"):
        held_out([one.aggregated() for one in samples("attention_forward_causal")], ("heads", "tokens"), "attention",
                 options.csv)
    if options.family in (None, "blocks"):
        blocks(samples("transformer_block_ops_vidur"), options.csv)


if __name__ == "__main__":
    main()
