"""Whole steps of random-table DLRMs on 1, 2, 4 and 8 ranks of this machine, predicted from their parts and run.

    python benchmarks/dlrm_e2e.py [--ranks 1 2 4 8] [--models 10] [--lookups LOOKUPS.csv …] [--keep CASES.csv]

As Lin et al. (2024) judge their end-to-end model. What was run for a prediction is the same model on as many processes
with tables of eight rows that are looked up once: its dense part and what sharding costs the host. What its real tables
take more is what `foretrace shard --unfused` says of every rank's look-ups, gradients, updates and exchanges (by the
formulas shipped, or with look-ups learned from what `dlrm_lookups.py` measured of other shapes). Tables are spread by
look-ups · columns; more processes than cores share them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pandas
from dlrm_parts.run_shardings import measure_all
from dlrm_sharding import LearnedLookups, balanced, figures_of, predicted_us, random_model

from tracer.lookup_data.tables import EmbeddingTable

EMPTY_ROWS = 8


def empty(tables: list[EmbeddingTable]) -> list[EmbeddingTable]:
    """Tables that cost next to nothing, of the same columns: what is left of the model is its dense part."""
    return [replace(table, rows=EMPTY_ROWS, bag=1.0, skew=0.0) for table in tables]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lookups", type=Path, nargs="+", default=[], help="what dlrm_lookups.py measured")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--models", type=int, default=10)
    parser.add_argument("--first", type=int, default=200, help="seed of the first model")
    parser.add_argument("--batch", type=int, default=1024, help="samples of a rank")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--keep", type=Path, help="where to write every case")
    given = parser.parse_args()
    learned, cores = LearnedLookups.of(given.lookups), len(os.sched_getaffinity(0))
    models = {seed: random_model(seed) for seed in range(given.first, given.first + given.models)}
    rows = []
    for ranks in given.ranks:
        places = {seed: balanced(figures_of(tables)["look-ups · columns"], ranks) for seed, tables in models.items()}
        without = {seed: empty(tables) for seed, tables in models.items()}
        cases = [(tables, [list(map(str, places[seed]))])
                 for each in (without, models) for seed, tables in each.items()]
        run = [1e6 * each[0] for each in measure_all(cases, ranks, given.batch, given.steps)]
        for (seed, tables), rest, measured in zip(models.items(), run[:len(models)], run[len(models):], strict=True):
            of_tables, of_empty = (predicted_us(each, places[seed], ranks, given.batch, cores, learned)
                                   for each in (tables, without[seed]))
            rows.append({"ranks": ranks, "model": seed, "tables": len(tables), "rest_us": rest,
                         "predicted_us": rest + of_tables - of_empty, "measured_us": measured})
    _report(pandas.DataFrame(rows))
    if given.keep:
        pandas.DataFrame(rows).to_csv(given.keep, index=False)


def _report(cases: pandas.DataFrame) -> None:
    print(f"{'ranks':>5} {'steps':>5} {'measured ms':>16}  "
          f"{'MAPE':>6} {'median':>6} {'bias':>6} {'p90':>6} {'max':>6}  of tables")
    for name, rows in [*cases.groupby("ranks"), ("all", cases)]:
        off, share = rows["predicted_us"] / rows["measured_us"] - 1, 1 - rows["rest_us"] / rows["measured_us"]
        far, times = off.abs(), rows["measured_us"] / 1e3
        print(f"{name:>5} {len(rows):>5} {times.min():7.1f} – {times.max():6.1f}  {far.mean():6.1%} "
              f"{far.median():6.1%} {off.mean():+6.1%} {far.quantile(0.9):6.1%} {far.max():6.1%} {share.median():7.0%}")


if __name__ == "__main__":
    main()
