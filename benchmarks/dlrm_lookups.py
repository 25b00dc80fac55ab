"""Look-ups on this machine's CPU over rows, columns, bag lengths and skew: measured in turns, then predicted held out.

    python benchmarks/dlrm_lookups.py measure RESULTS.csv [--cases 280] [--rounds 40] [--seed 7]
    python benchmarks/dlrm_lookups.py judge RESULTS.csv [MORE.csv] [--cases-out FILE]

One thread; two runs with different seeds at once, judged together, measure it with the other core as busy as in a job.
Every round times cases anew on fresh batches. This machine runs in a fast and a slow state (a third to twice as long),
each for seconds: a case is run until its three quickest rounds agree within 5%, and their median counts (others
lengthen a run and never shorten it). Single tables are `nn.functional.embedding_bag` (and plain look-ups), batched ones
one call over the tables' rows laid one after another, as table-batched kernels have them; "update" adds a sparse
gradient to its table. `judge` leaves out groups of shapes (rows, columns, bag) by hash: nothing of a judged group was
fitted, whatever its skew.
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import numpy as np
import pandas
from dlrm_parts.steady import restart_with_steady_memory

from kernel_models.datasets.samples import Samples, fold_of
from kernel_models.device import device
from kernel_models.families.index import index
from kernel_models.heuristics.efficiency import fit_efficiencies
from kernel_models.heuristics.roofline import RooflineModel
from kernel_models.learned.gaussian import fit_gaussian
from kernel_models.op_call import OpCall, TablePart
from kernel_models.operation import backward_calls_of, calls_of, operation
from tracer.lookup_data.tables import histogram_of_zipf

KINDS = ("bag", "bag", "bag", "embedding", "bag_backward", "bag_backward_sparse", "update")
"""What is drawn from. "update": an optimizer's step adds a sparse gradient to the table."""
SKEWS = (0.0, 0.6, 0.9, 1.05, 1.4)
LARGEST_TABLES = 192 * 2**20
"""Bytes of the tables of a case."""
MOST_LOOKUPS = 6e5
BATCHES = 4
AGREEING, AGREED = 3, 0.05
"""Rounds of a case that must agree, and how well."""
RUN_S = 0.008
"""Seconds that a case is run for in a round."""


@dataclass(frozen=True)
class LookupCase:
    """One case: ``tables`` tables of the same description in one call, each with its own rows looked up."""

    kind: str
    rows: int
    columns: int
    bag: int
    samples: int
    skew: float
    tables: int

    @property
    def group(self) -> str:
        """The shape, whatever the skew and the samples."""
        return f"{self.kind} {self.rows} {self.columns} {self.bag}"


def cases(count: int, seed: int = 7) -> list[LookupCase]:
    """Shapes drawn evenly in their logarithms, each with two of the skews."""
    rng = np.random.default_rng(seed)
    found: list[LookupCase] = []
    while len(found) < count:
        kind = str(rng.choice(KINDS))
        rows, columns = int(10 ** rng.uniform(2.5, 6.3)), int(rng.choice([8, 16, 32, 64, 128, 256]))
        bag = 1 if kind == "embedding" else round(2 ** rng.uniform(0, 6))
        samples = round(2 ** rng.uniform(5, 13))
        tables = int(rng.choice([1, 1, 2, 4, 8])) if kind == "bag" else 1
        if rows * columns * 4 * tables > LARGEST_TABLES or samples * bag * tables > MOST_LOOKUPS:
            continue
        if kind == "bag_backward" and rows * columns > 4e6:
            continue
        found += [LookupCase(kind, rows, columns, bag, samples, float(skew), tables)
                  for skew in rng.choice(SKEWS, 2, replace=False)]
    return found[:count]


def measure(path: Path, count: int, rounds: int, seed: int = 7) -> None:
    """Time the cases in rounds until each one's three quickest agree; what was measured is written after each round."""
    import torch

    torch.set_num_threads(1)
    every = cases(count, seed)
    times: list[list[float]] = [[] for _ in every]
    for turn in range(rounds):
        open_ = [i for i in range(len(every)) if len(times[i]) < AGREEING or _spread(times[i]) > AGREED]
        if not open_:
            break
        for i in np.random.default_rng(turn).permutation(open_):
            times[i].append(_time(every[i], turn))
        table = pandas.DataFrame([asdict(case) for case in every])
        table["measured_us"] = [float(np.median(sorted(one)[:AGREEING])) for one in times]
        table["spread"] = [_spread(one) for one in times]
        table["rounds"] = [len(one) for one in times]
        table.to_csv(path, index=False)
        print(f"round {turn + 1}: {len(open_)} cases; the three quickest differ by {table['spread'].median():.1%} "
              f"(median)", flush=True)


def _spread(times: list[float]) -> float:
    quickest = sorted(times)[:AGREEING]
    return quickest[-1] / quickest[0] - 1.0


def _time(case: LookupCase, turn: int) -> float:
    import torch

    from tracer.workloads.models.lookups import zipf_rows

    random = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()) + turn)
    weight = torch.empty(case.rows * case.tables, case.columns).uniform_(-0.1, 0.1, generator=random)
    count = case.samples * case.bag
    batches = [torch.cat([zipf_rows(case.rows, count, case.skew, random) + table * case.rows
                          for table in range(case.tables)]) for _ in range(BATCHES)]
    starts = torch.arange(0, count * case.tables, case.bag)
    weight.requires_grad_("backward" in case.kind)
    if case.kind == "update":
        gradients = [torch.sparse_coo_tensor(rows[None], torch.randn(count, case.columns), weight.shape)
                     for rows in batches]
    sparse = case.kind.endswith("sparse")
    functional = torch.nn.functional

    def forward(rows: torch.Tensor) -> torch.Tensor:
        if case.kind == "embedding":
            return functional.embedding(rows, weight)
        return functional.embedding_bag(rows, weight, starts, mode="sum", sparse=sparse)

    if "backward" in case.kind:
        outputs = [forward(rows) for rows in batches]
        gradient = torch.randn_like(outputs[0])

        def run(turn: int) -> None:
            torch.autograd.grad(outputs[turn % BATCHES], (weight,), gradient, retain_graph=True)
    elif case.kind == "update":
        def run(turn: int) -> None:
            weight.add_(gradients[turn % BATCHES], alpha=-1e-6)
    else:
        def run(turn: int) -> None:
            with torch.no_grad():
                forward(batches[turn % BATCHES])
    for turn in range(BATCHES):
        run(turn)
    taken: list[float] = []
    end = time.perf_counter() + RUN_S
    while len(taken) < 5 or (time.perf_counter() < end and len(taken) < 400):
        before = time.perf_counter_ns()
        run(len(taken))
        taken.append((time.perf_counter_ns() - before) / 1e3)
    return float(np.percentile(taken, 25))


def cases_of(table: pandas.DataFrame) -> list[LookupCase]:
    """The cases of a table of results."""
    return [LookupCase(**{one.name: row[one.name] for one in fields(LookupCase)}) for row in table.to_dict("records")]


def samples_of(table: pandas.DataFrame) -> list[Samples]:
    """The measured cases as calls, a set for each family."""
    every = cases_of(table)
    calls = [call_of(case) for case in every]
    found = []
    for family in dict.fromkeys(call.family for call in calls):
        at = [i for i, call in enumerate(calls) if call.family is family]
        found.append(Samples("cpu", "torch", "dlrm_lookups", [calls[i] for i in at],
                             table["measured_us"].to_numpy(float)[at], {"shape": [every[i].group for i in at]}))
    return found


def call_of(case: LookupCase) -> OpCall:
    """The case as what is priced."""
    count, every = case.samples * case.bag, case.samples * case.bag * case.tables
    dtypes = ["fp32", "int64", "int64"]
    sparse = case.kind.endswith("sparse")
    weight = (case.rows * case.tables, case.columns)
    if case.kind == "update":
        calls = list(index("index_add", count * case.columns, case.columns, case.rows * case.columns, "fp32"))
    elif case.kind == "embedding":
        one = operation("aten::embedding", [weight, (every,)], dtypes[:2])
    else:
        one = operation("aten::_embedding_bag", [weight, (every,), (case.samples * case.tables,)], dtypes, None,
                        [None, None, None, False, 0, sparse])
    if case.kind != "update":
        calls = backward_calls_of(one) if "backward" in case.kind else calls_of(one)
    reuse = histogram_of_zipf(count, case.rows, case.skew) if case.skew else ()
    bags = count if case.kind == "embedding" else case.samples
    part = TablePart(case.rows, case.columns, "fp32", count, bags, case.bag, reuse)
    return replace(calls[0], accesses=(part,) * case.tables)


def read_cases(paths: Sequence[Path]) -> pandas.DataFrame:
    """The measured cases of several runs."""
    return pandas.concat([pandas.read_csv(path) for path in paths], ignore_index=True)


def judge(paths: Sequence[Path], cases_out: Path | None) -> None:
    """Every case as predicted without its shape; then pairs of one shape at two skews."""
    table = read_cases(paths)
    spec = device("cpu")
    table["learned_us"] = table["formula_us"] = np.nan
    families = [call_of(case).family for case in cases_of(table)]
    for samples in samples_of(table):
        mine = np.array([i for i, family in enumerate(families) if family is samples.family])
        table.loc[mine, "learned_us"] = fit_gaussian(samples, spec)[1]
        fold = np.array([fold_of(label, 5) for label in samples.labels()])
        for one in range(5):
            known = fold != one
            fitted = fit_efficiencies([c for c, k in zip(samples.calls, known, strict=True) if k],
                                      samples.measured_us[known], spec)
            left = [c for c, k in zip(samples.calls, known, strict=True) if not k]
            table.loc[mine[~known], "formula_us"] = RooflineModel(samples.family, spec, fitted).predict(left).time_us
    print(f"{len(table)} cases, shapes left out; a case's three quickest rounds differ by "
          f"{table['spread'].median():.1%} (median)")
    print(f"{'':24} {'n':>4}  learned: MAPE median  bias   p90   max   formulas: MAPE median  bias")
    for kind, rows in [("all", table), *table.groupby("kind"), *((f"skew {s}", r) for s, r in table.groupby("skew"))]:
        line = f"{kind:24} {len(rows):4d}"
        for name in ("learned_us", "formula_us"):
            off = rows[name] / rows["measured_us"] - 1
            far = off.abs()
            line += f"  {far.mean():12.1%} {far.median():6.1%} {off.mean():+6.1%}"
            line += f" {far.quantile(0.9):6.1%} {far.max():5.0%}" if name == "learned_us" else ""
        print(line)
    _print_pairs(table)
    if cases_out:
        table.to_csv(cases_out, index=False)


def _print_pairs(table: pandas.DataFrame) -> None:
    """Does time fall with reuse as measured? The ratio of a shape's two skews, measured and predicted."""
    ratios = []
    for _, pair in table.groupby(["kind", "rows", "columns", "bag", "samples", "tables"]):
        if len(pair) == 2:
            flat, skewed = (pair.sort_values("skew").iloc[i] for i in (0, 1))
            ratios.append([skewed[name] / flat[name] for name in ("measured_us", "learned_us", "formula_us")])
    measured, learned, formula = np.array(ratios).T
    clear = np.abs(np.log(measured)) > 0.1
    print(f"{len(measured)} shapes at two skews: time at the larger over the smaller one, median "
          f"{np.median(measured):.3f} measured, {np.median(learned):.3f} learned, {np.median(formula):.3f} formulas;")
    print(f"  of the {clear.sum()} that differ by over 10%, the direction is right in "
          f"{np.mean((measured > 1)[clear] == (learned > 1)[clear]):.0%} (learned), "
          f"{np.mean((measured > 1)[clear] == (formula > 1)[clear]):.0%} (formulas)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "judge"))
    parser.add_argument("results", type=Path, nargs="+", help="where cases are written; several are judged together")
    parser.add_argument("--cases", type=int, default=280)
    parser.add_argument("--rounds", type=int, default=40, help="at most")
    parser.add_argument("--seed", type=int, default=7, help="of the cases drawn")
    parser.add_argument("--cases-out", type=Path)
    given = parser.parse_args()
    if given.what == "measure":
        restart_with_steady_memory()
        measure(given.results[0], given.cases, given.rounds, given.seed)
    else:
        judge(given.results, given.cases_out)


if __name__ == "__main__":
    main()
