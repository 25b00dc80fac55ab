"""Choosing a sharding without running it: random DLRMs on gloo processes of this machine, ten candidates each, all run.

    python benchmarks/dlrm_sharding.py [--ranks 2 4] [--models 20] [--lookups LOOKUPS.csv …] [--keep RESULTS.json]
    python benchmarks/dlrm_sharding.py --again RESULTS.json     # runs that were kept, predicted anew

As Lin et al. (2024) judge theirs: of ten candidate shardings of a model, is the one predicted fastest the fastest, or
within 5% of it? (Theirs: 17 of 20 on GPUs.) Candidates are table-wise: by size, by look-ups, by columns (each the
greedy balance of that figure), and seven drawn. Predictions are what `foretrace shard --unfused --device cpu` says of
each, by the formulas shipped, or with look-ups learned from what `dlrm_lookups.py` measured of other shapes; no
sharding was run for them. Several processes on fewer cores share them evenly. Beside it: what choosing by each single
figure would have given.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from dlrm_lookups import read_cases, samples_of
from dlrm_parts.run_shardings import measure_all

from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import DeviceSpec, device
from kernel_models.learned.gaussian import GaussianModel, fit_gaussian
from kernel_models.op_call import Family, KernelModel
from planner.sharding.choices import choices_of
from planner.sharding.estimate import estimate
from planner.sharding.problem import ShardingPlan, ShardingProblem
from planner.sharding.step import Scores, StepModel, assignment_of
from tracer.lookup_data.plan_file import ShardKind, TableSharding
from tracer.lookup_data.tables import EmbeddingTable

CPU = device("cpu")
CANDIDATES = 10
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


@dataclass(frozen=True)
class LearnedLookups:
    """What look-ups, their gradients and updates cost here, from measurements of other shapes."""

    device: DeviceSpec
    models: Mapping[Family, GaussianModel]

    @classmethod
    def of(cls, paths: Sequence[Path]) -> LearnedLookups | None:
        """Of files that ``dlrm_lookups.py`` wrote; ``None`` without any."""
        return cls(CPU, {one.family: fit_gaussian(one, CPU)[0] for one in samples_of(read_cases(paths))}) \
            if paths else None

    def models_of(self, family: Family) -> Sequence[KernelModel]:
        """As a device's profile has it."""
        return [self.models[family]] if family in self.models else []


def predicted_us(tables: Sequence[EmbeddingTable], places: Sequence[int], ranks: int, batch: int, cores: int,
                 learned: LearnedLookups | None) -> float:
    """The part of a step that a sharding decides: what ``foretrace shard`` estimates, on shared cores.

    Args:
        places: rank of each table.
        batch: samples of a rank.
    """
    trained = tuple(replace(table, optimizer="sgd") for table in tables)
    problem = ShardingProblem(trained, batch, ranks, CPU, CollectiveModel(topology_of(CPU, ranks)), learned,
                              fused=False, pipelined=False)
    plan = ShardingPlan(trained, tuple(TableSharding(ShardKind.TABLE_WISE, (rank,)) for rank in places), ranks, ranks)
    choices = choices_of(problem, plan.shardings)
    step = estimate(Scores(problem, choices, StepModel(problem)), assignment_of(plan, choices))
    work = sum(shared_cores_us(each, cores) - float(each.max()) for each in (step.forward_us, step.backward_us))
    return step.time_us + work


def shared_cores_us(work: np.ndarray, cores: int) -> float:
    """When the last of some processes is done that share fewer cores evenly."""
    done, now, left = 0.0, 0.0, np.sort(work)
    for i, each in enumerate(left):
        now += (each - done) * max((len(left) - i) / cores, 1.0)
        done = each
    return now


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", type=int, default=20)
    parser.add_argument("--first", type=int, default=0, help="seed of the first model")
    parser.add_argument("--batch", type=int, default=2048, help="samples of a rank")
    parser.add_argument("--steps", type=int, default=30, help="rounds: a step of every candidate")
    parser.add_argument("--lookups", type=Path, nargs="+", default=[], help="what dlrm_lookups.py measured")
    parser.add_argument("--keep", type=Path, help="where to write every case")
    parser.add_argument("--again", type=Path, nargs="+", default=[], help="kept cases instead of runs")
    given = parser.parse_args()
    learned, cores = LearnedLookups.of(given.lookups), len(os.sched_getaffinity(0))
    kept = [row for path in given.again for row in json.loads(path.read_text())]
    for ranks in [] if kept else given.ranks:
        seeds = range(given.first, given.first + given.models)
        models = [random_model(seed) for seed in seeds]
        every = [candidates_of(tables, ranks, seed) for seed, tables in zip(seeds, models, strict=True)]
        run = measure_all([(tables, [list(map(str, places)) for places in candidates])
                           for tables, candidates in zip(models, every, strict=True)],
                          ranks, given.batch, given.steps, **DENSE)
        kept += [{"ranks": ranks, "model": seed, "batch": given.batch, "places": candidates,
                  "measured_us": [1e6 * one for one in seconds]}
                 for seed, candidates, seconds in zip(seeds, every, run, strict=True)]
    for row in kept:
        tables, ranks = random_model(row["model"]), row["ranks"]
        row["predicted_us"] = [predicted_us(tables, places, ranks, row["batch"], cores, learned)
                               for places in row["places"]]
        row |= {name: [float(np.bincount(places, weights, ranks).max()) for places in row["places"]]
                for name, weights in figures_of(tables).items()}
    if given.keep:
        given.keep.write_text(json.dumps(kept))
    for ranks in dict.fromkeys(row["ranks"] for row in kept):
        _report([row for row in kept if row["ranks"] == ranks])


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
