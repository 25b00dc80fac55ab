"""Whole steps of random-table DLRMs on 1, 2, 4 and 8 ranks of this machine, predicted from their parts and run.

    python benchmarks/dlrm_e2e.py [--ranks 1 2 4 8] [--models 10] [--lookups LOOKUPS.csv …] [--keep CASES.csv]

As Lin et al. (2024) judge their end-to-end model. The parts of a prediction: what `foretrace shard --unfused` says of
every rank's look-ups, gradients, updates and exchanges (by the formulas shipped, or with look-ups learned from what
`dlrm_lookups.py` measured of other shapes); gloo's all-reduce by its formulas; and the dense part, measured on one
process (the same model with tables of eight rows, looked up once). No step with these tables was run for it. Tables are
spread by look-ups · columns; more processes than cores share them.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pandas
from dlrm_parts.run_shardings import measure_all, settings_of
from dlrm_sharding import CPU, LearnedLookups, balanced, figures_of, predicted_us, random_model

from kernel_models.collectives import (
    CollectiveCall,
    CollectiveKind,
    CollectiveModel,
    Placement,
    price_calls,
    topology_of,
)
from tracer.lookup_data.tables import EmbeddingTable

EMPTY_ROWS = 8


def empty(tables: list[EmbeddingTable]) -> list[EmbeddingTable]:
    """Tables that cost next to nothing, of the same columns: what is left of the model is its dense part."""
    return [replace(table, rows=EMPTY_ROWS, bag=1.0, skew=0.0) for table in tables]


def dense_bytes(tables: list[EmbeddingTable], batch: int) -> float:
    """Gradients that every rank has of the dense part."""
    from tracer.workloads import create

    model = create(settings_of(empty(tables), batch)).model
    inside = {id(weight) for part in model.modules() for weight in part.parameters(recurse=False)
              if type(part).__name__.startswith("Embedding")}
    return 4.0 * sum(weight.numel() for weight in model.parameters() if id(weight) not in inside)


def reduce_us(payload: float, ranks: int) -> float:
    """An all-reduce of so many bytes on processes of one machine."""
    collectives = CollectiveModel(topology_of(CPU, ranks))
    call = CollectiveCall(CollectiveKind.ALL_REDUCE, payload, Placement((ranks,)))
    return float(price_calls([call], collectives).time_us[0]) if ranks > 1 else 0.0


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
    alone = measure_all([(empty(tables), [["0"] * len(tables)]) for tables in models.values()], 1, given.batch,
                        given.steps)
    rows = []
    for ranks in given.ranks:
        places = {seed: balanced(figures_of(tables)["look-ups · columns"], ranks) for seed, tables in models.items()}
        run = measure_all([(tables, [list(map(str, places[seed]))]) for seed, tables in models.items()], ranks,
                          given.batch, given.steps)
        for (seed, tables), dense, measured in zip(models.items(), alone, run, strict=True):
            predicted = (1e6 * dense[0] * max(ranks / cores, 1.0) + reduce_us(dense_bytes(tables, given.batch), ranks)
                         + predicted_us(tables, places[seed], ranks, given.batch, cores, learned))
            rows.append({"ranks": ranks, "model": seed, "tables": len(tables), "dense_us": 1e6 * dense[0],
                         "predicted_us": predicted, "measured_us": 1e6 * measured[0]})
    _report(pandas.DataFrame(rows))
    if given.keep:
        pandas.DataFrame(rows).to_csv(given.keep, index=False)


def _report(cases: pandas.DataFrame) -> None:
    print(f"{'ranks':>5} {'steps':>5} {'measured ms':>16}  {'MAPE':>6} {'median':>6} {'bias':>6} {'p90':>6} {'max':>6}")
    for name, rows in [*cases.groupby("ranks"), ("all", cases)]:
        off = rows["predicted_us"] / rows["measured_us"] - 1
        far, times = off.abs(), rows["measured_us"] / 1e3
        print(f"{name:>5} {len(rows):>5} {times.min():7.1f} – {times.max():6.1f}  {far.mean():6.1%} "
              f"{far.median():6.1%} {off.mean():+6.1%} {far.quantile(0.9):6.1%} {far.max():6.1%}")


if __name__ == "__main__":
    main()
