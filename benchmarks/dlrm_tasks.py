"""Shardings of generated tasks: the search beside greedy and TorchRec-like planning, under the same model of the step.

    python benchmarks/dlrm_tasks.py [--seeds 2] [--largest]

Tasks follow the published recipes of DreamShard and NeuroShard (``dlrm_parts.tasks``; nothing is downloaded,
and the pool of tables is drawn). Each row is the mean over seeds: the predicted step of the search's fastest sharding,
how much longer the best of the three greedy baselines, a random sharding and TorchRec-like planning take, and the time
of the whole search, with the pricing of every way of each table. ``--largest`` runs 10,000 tables over 128 GPUs alone.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import numpy as np
from dlrm_parts.tasks import dreamshard_task, neuroshard_task

from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import device
from planner.sharding.problem import ShardingProblem
from planner.sharding.search import COSTS, RANDOM, TORCHREC, ShardingSearch, search
from tracer.lookup_data.tables import EmbeddingTable

DEVICE = device("h100-sxm")
SAMPLES = 512
"""Of a batch on each GPU."""
TASKS = (("DreamShard", 50, 8), ("NeuroShard", 60, 8), ("NeuroShard", 120, 16), ("NeuroShard", 240, 32),
         ("DreamShard", 400, 64), ("NeuroShard", 480, 64), ("NeuroShard", 960, 128))
LARGEST = "DreamShard", 10_000, 128


def task_of(recipe: str, tables: int, gpus: int, seed: int) -> list[EmbeddingTable]:
    """Tables of a recipe; NeuroShard's may take half the memory of all GPUs."""
    if recipe == "DreamShard":
        return dreamshard_task(seed, tables, 64)
    return neuroshard_task(seed, tables, 0.5 * gpus * DEVICE.memory_gb * 1e9)


def run(recipe: str, tables: int, gpus: int, seed: int) -> tuple[ShardingSearch, float]:
    """A search and its seconds."""
    began = time.perf_counter()
    problem = ShardingProblem(tuple(task_of(recipe, tables, gpus, seed)), SAMPLES, gpus, DEVICE,
                              CollectiveModel(topology_of(DEVICE, gpus)))
    return search(problem, 5, seed), time.perf_counter() - began


def row(recipe: str, tables: int, gpus: int, seeds: Sequence[int]) -> str:
    """One line of the table."""
    steps, greedy, drawn, planner, seconds = [], [], [], [], []
    for seed in seeds:
        found, took = run(recipe, tables, gpus, seed)
        best = found.best[0][0]

        def longer(names: Sequence[str], found: ShardingSearch = found, best: float = best) -> float:
            known = [each[0] for name in names if (each := found.baselines[name]) is not None]
            return min(known) / best - 1 if known else np.nan

        steps.append(best / 1e3)
        greedy.append(longer(list(COSTS)))
        drawn.append(longer([RANDOM]))
        planner.append(longer([TORCHREC]))
        seconds.append(took)
    return (f"{recipe:11} {tables:7,} {gpus:5} {np.mean(steps):9.3f} {np.mean(greedy):+9.1%} {np.mean(drawn):+9.1%} "
            f"{np.mean(planner):+9.1%} {np.max(seconds):9.1f}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--largest", action="store_true")
    arguments = parser.parse_args()
    print(f"{DEVICE.name}, {SAMPLES} samples on each GPU\n")
    print(f"{'recipe':11} {'tables':>7} {'GPUs':>5} {'search ms':>9} {'greedy':>9} {'random':>9} {'TorchRec':>9} "
          f"{'seconds':>9}")
    for task in (LARGEST,) if arguments.largest else TASKS:
        print(row(*task, range(1 if arguments.largest else arguments.seeds)), flush=True)


if __name__ == "__main__":
    main()
