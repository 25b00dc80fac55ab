"""Choosing a sharding without running it: random DLRMs on gloo processes of this machine, ten candidates each, all run.

    python benchmarks/dlrm_lookups.py measure LOOKUPS.csv       # what look-ups cost here, once (minutes, quiet machine)
    python benchmarks/dlrm_sharding.py LOOKUPS.csv --ranks 2 4 [--models 20] [--keep RESULTS.json]

As Lin et al. (2024) judge theirs: of ten candidate shardings of a model, is the one predicted fastest the fastest, or
within 5% of it? (Theirs: 17 of 20 on GPUs.) Candidates are table-wise: by size, by look-ups, by columns (each the
greedy balance of that figure), and seven drawn. Predictions know the tables, the look-ups' costs measured on other
shapes (one thread, one process), and a sweep of gloo's all-to-all; no sharding was run for them. Several processes on
fewer cores share them evenly. Beside it: what choosing by each single figure would have given.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas
from dlrm_lookups import LookupCase, call_of, read_cases, samples_of
from dlrm_parts.run_shardings import measure_all

from kernel_models.datasets.samples import Samples
from kernel_models.device import device
from kernel_models.learned.gaussian import GaussianModel, fit_gaussian
from kernel_models.op_call import Family
from kernel_models.operation import calls_of, operation
from kernel_models.pricing import price
from tracer.comm_bench.plan import BenchPlan, sweep_sizes
from tracer.comm_bench.runner import run_bench
from tracer.lookup_data.tables import EmbeddingTable

CANDIDATES = 10
KINDS = ("bag", "bag_backward_sparse", "update")
WITHIN = 0.05
DENSE = {"embedding": 16, "width": 32, "depth": 1}
"""Of the dense part, which no sharding changes: small, as it is beside the tables of large recommenders."""


def random_model(seed: int) -> list[EmbeddingTable]:
    """Six to twelve unequal tables, sizes drawn evenly in their logarithms: small enough for ten candidates at once."""
    rng = np.random.default_rng(1000 + seed)
    return [EmbeddingTable(f"tables.{i}", int(10 ** rng.uniform(3, 5)), int(rng.choice([16, 32, 64, 128])),
                           bag=round(2 ** rng.uniform(0, 6)), skew=float(rng.choice([0.0, 0.8, 1.05, 1.3])))
            for i in range(int(rng.integers(6, 13)))]


def balanced(weights: Sequence[float], ranks: int) -> tuple[int, ...]:
    """The heaviest first, each to the lightest rank."""
    loads, found = np.zeros(ranks), [0] * len(weights)
    for i in np.argsort(weights)[::-1]:
        found[i] = int(np.argmin(loads))
        loads[found[i]] += weights[i]
    return tuple(found)


def figures_of(tables: Sequence[EmbeddingTable]) -> dict[str, list[float]]:
    """Single figures that shardings are balanced by."""
    return {"size": [table.weight_bytes for table in tables], "look-ups": [table.bag for table in tables],
            "columns": [float(table.columns) for table in tables],
            "look-ups · columns": [table.bag * table.columns for table in tables]}


def candidates_of(tables: Sequence[EmbeddingTable], ranks: int, seed: int) -> list[tuple[int, ...]]:
    """Ten different table-wise shardings, the greedy ones by single figures first."""
    rng = np.random.default_rng(seed)
    found = dict.fromkeys(balanced(weights, ranks) for name, weights in figures_of(tables).items()
                          if name != "look-ups · columns")
    while len(found) < CANDIDATES:
        drawn = tuple(rng.integers(0, ranks, len(tables)).tolist())
        if len(set(drawn)) == ranks:
            found[drawn] = None
    return list(found)


def learned_lookups(measured: Sequence[Samples]) -> dict[Family, GaussianModel]:
    """What look-ups, their gradients and updates cost here, from measurements of other shapes."""
    return {one.family: fit_gaussian(one, device("cpu"))[0] for one in measured}


class CostModel:
    """What a rank's tables and the collectives of a sharding take on this machine, µs; sweeps run when it is made."""

    def __init__(self, learned: Mapping[Family, GaussianModel], ranks: int) -> None:
        self.models, self.ranks, self.cores = learned, ranks, len(os.sched_getaffinity(0))
        self.exchanges = self.reductions = np.array([0.0, 1.0]), np.zeros(2)
        if ranks > 1:
            self.exchanges, self.reductions = (_curve(kind, ranks) for kind in ("all_to_all", "all_reduce"))

    def table_us(self, table: EmbeddingTable, samples: int) -> tuple[float, float, float]:
        """A table's look-up, its gradient, and the optimizer's step.

        With the first two what copies look-ups and vectors: look-ups from several ranks are laid together, and then a
        call's; vectors are cut for each rank and laid together, and so are their gradients.
        """
        ahead, back, update = (self._kernel_us(kind, table, samples) for kind in KINDS)
        indices, vectors = 8.0 * table.bag * samples, 4.0 * table.columns * samples
        return ahead + self.copied_us(2.0 * (indices + vectors)), back + self.copied_us(2.0 * vectors), update

    def _kernel_us(self, kind: str, table: EmbeddingTable, samples: int) -> float:
        call = call_of(LookupCase(kind, table.rows, table.columns, round(table.bag), samples, table.skew, 1))
        return float(self.models[call.family].predict([call]).time_us[0])

    def copied_us(self, bytes_: float) -> float:
        half = (int(bytes_ / 8),)
        return float(price(calls_of(operation("aten::cat", [half, half], ["fp32"] * 2)), device("cpu")).time_us[0])

    def step_us(self, tables: Sequence[EmbeddingTable], costs: Sequence[tuple[float, float, float]],
                places: Sequence[int], batch: int) -> float:
        """The part of a step that depends on the sharding: the slowest rank's look-ups, gradients and updates, between
        which ranks meet (in the vectors' exchange and in the dense part's all-reduce), and the exchanges."""
        work, vectors, indices = np.zeros((len(KINDS), self.ranks)), np.zeros(self.ranks), np.zeros(self.ranks)
        for table, cost, rank in zip(tables, costs, places, strict=True):
            work[:, rank] += cost
            vectors[rank] += 4.0 * batch * table.columns
            indices[rank] += 8.0 * batch * table.bag
        exchanged = 2.0 * self._exchange_us(vectors) + self._exchange_us(indices)
        return sum(shared_cores_us(each, self.cores) for each in work) + exchanged

    def _exchange_us(self, own: np.ndarray) -> float:
        """Of what each rank has for every other one, bytes [ranks]; gradients go the other way.

        On one machine each byte costs its sender and its receiver time of a core: a rank takes as long as in an even
        exchange of the mean of what it sends and receives.
        """
        passed = own * (self.ranks - 1) + own.sum() - own
        payload = float(passed.max()) / 2.0 * self.ranks / max(self.ranks - 1, 1)
        return _at(self.exchanges, payload)

    def reduce_us(self, payload: float) -> float:
        """An all-reduce of so many bytes."""
        return _at(self.reductions, payload)


def shared_cores_us(work: np.ndarray, cores: int) -> float:
    """When the last of some processes is done that share fewer cores evenly."""
    done, now, left = 0.0, 0.0, np.sort(work)
    for i, each in enumerate(left):
        now += (each - done) * max((len(left) - i) / cores, 1.0)
        done = each
    return now


def _curve(collective: str, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Payloads and times of a sweep run now."""
    with tempfile.TemporaryDirectory() as folder:
        path = run_bench(BenchPlan((collective,), sweep_sizes(1 << 12, 1 << 23), rounds=5), ranks,
                         Path(folder) / "sweep.jsonl")
        one = pandas.read_json(path, lines=True).groupby("payload_bytes")["latency_us"].median()
    return one.index.to_numpy(float), np.maximum.accumulate(one.to_numpy(float))


def _at(curve: tuple[np.ndarray, np.ndarray], payload: float) -> float:
    sizes, times = curve
    beyond = max(payload / sizes[-1], 1.0)
    return float(np.interp(payload / beyond, sizes, times) * beyond)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lookups", type=Path, nargs="+", help="what dlrm_lookups.py measured")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first model")
    parser.add_argument("--batch", type=int, default=2048, help="samples of a rank")
    parser.add_argument("--steps", type=int, default=45, help="rounds: a step of every candidate")
    parser.add_argument("--keep", type=Path, help="where to write every case")
    given = parser.parse_args()
    learned, kept = learned_lookups(samples_of(read_cases(given.lookups))), []
    for ranks in given.ranks:
        costs = CostModel(learned, ranks)
        seeds = range(given.first, given.first + given.models)
        models = [random_model(seed) for seed in seeds]
        every = [candidates_of(tables, ranks, seed) for seed, tables in zip(seeds, models, strict=True)]
        run = measure_all([(tables, [list(map(str, places)) for places in candidates])
                           for tables, candidates in zip(models, every, strict=True)],
                          ranks, given.batch, given.steps, **DENSE)
        for seed, tables, candidates, seconds in zip(seeds, models, every, run, strict=True):
            own = [costs.table_us(table, given.batch * ranks) for table in tables]
            predicted = [costs.step_us(tables, own, places, given.batch) for places in candidates]
            kept.append({"ranks": ranks, "model": seed, "tables": len(tables),
                         "measured_us": [1e6 * one for one in seconds], "predicted_us": predicted, "places": candidates,
                         "costs_us": own,
                         **{name: [float(np.bincount(places, weights, ranks).max()) for places in candidates]
                            for name, weights in figures_of(tables).items()}})
        _report([one for one in kept if one["ranks"] == ranks])
    if given.keep:
        given.keep.write_text(json.dumps(kept))


def _report(rows: list[dict]) -> None:
    ranks = rows[0]["ranks"]
    apart = np.median([max(row["measured_us"]) / min(row["measured_us"]) for row in rows])
    print(f"\n{len(rows)} random DLRMs on {ranks} gloo processes, {CANDIDATES} shardings each, all run "
          f"(slowest over fastest: median {apart:.2f})")
    for name in ("predicted_us", *figures_of([])):
        chosen = [row["measured_us"][int(np.argmin(row[name]))] / min(row["measured_us"]) for row in rows]
        lost = np.array(chosen) - 1
        label = "predicted" if name == "predicted_us" else f"balance of {name}"
        print(f"  best by {label:30} the fastest {np.sum(lost == 0):2d}, within {WITHIN:.0%} "
              f"{np.sum(lost <= WITHIN):2d} of {len(rows)}; loses {lost.mean():.1%}, at most {lost.max():.0%}")
    drawn = [np.mean(np.array(row["measured_us"]) <= (1 + WITHIN) * min(row["measured_us"])) for row in rows]
    print(f"  drawn at random: within {WITHIN:.0%} {sum(drawn):.1f} of {len(rows)}")
    errors = []
    for row in rows:  # the rest of the step as the first candidate's, as where one sharding was captured
        measured, predicted = np.array(row["measured_us"]), np.array(row["predicted_us"])
        errors += ((measured[0] + predicted - predicted[0]) / measured - 1)[1:].tolist()
    far = np.abs(errors)
    print(f"  steps from the first candidate's time and predicted differences: MAPE {far.mean():.1%}, median "
          f"{np.median(far):.1%}, bias {np.mean(errors):+.1%}, p90 {np.quantile(far, 0.9):.1%}, max {far.max():.0%}")


if __name__ == "__main__":
    main()
