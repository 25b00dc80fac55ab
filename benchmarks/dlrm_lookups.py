"""Look-ups on this machine's CPU over rows, columns, bag lengths and skew: measured in turns, then predicted held out.

    python benchmarks/dlrm_lookups.py measure RESULTS.csv [--cases 240] [--rounds 3]
    python benchmarks/dlrm_lookups.py judge RESULTS.csv [--cases-out FILE]

One thread. Every round times every case anew on fresh batches, so that a slow minute of the machine falls on all; the
figure is the median over rounds. Single tables are `nn.functional.embedding_bag` (and plain look-ups), batched ones
one call over the tables' rows laid one after another, as table-batched kernels have them. `judge` leaves out groups of
shapes (rows, columns, bag) by hash: nothing of a judged group was fitted, whatever its skew.
"""

from __future__ import annotations

import argparse
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pandas

KINDS = ("bag", "bag", "bag", "embedding", "bag_backward", "bag_backward_sparse")
SKEWS = (0.0, 0.6, 0.9, 1.05, 1.4)
LARGEST_TABLES = 192 * 2**20
"""Bytes of the tables of a case."""
BATCHES = 4
RUN_S = 0.03
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
        samples = round(2 ** rng.uniform(5, 12))
        tables = int(rng.choice([1, 1, 2, 4, 8])) if kind == "bag" else 1
        if rows * columns * 4 * tables > LARGEST_TABLES or samples * bag * tables > 2e5:
            continue
        if kind == "bag_backward" and rows * columns > 4e6:
            continue
        found += [LookupCase(kind, rows, columns, bag, samples, float(skew), tables)
                  for skew in rng.choice(SKEWS, 2, replace=False)]
    return found[:count]


def measure(path: Path, count: int, rounds: int) -> None:
    """Time every case in every round; written after each round."""
    import torch

    torch.set_num_threads(1)
    every = cases(count)
    times = np.full((len(every), rounds), np.nan)
    for turn in range(rounds):
        for i in np.random.default_rng(turn).permutation(len(every)):
            times[i, turn] = _time(every[i], turn)
        table = pandas.DataFrame([asdict(case) for case in every])
        table["measured_us"] = np.nanmedian(times[:, :turn + 1], axis=1)
        table["spread"] = np.nanmax(times[:, :turn + 1], axis=1) / np.nanmin(times[:, :turn + 1], axis=1)
        table.to_csv(path, index=False)
        print(f"round {turn + 1}: {len(every)} cases; median spread {table['spread'].median():.3f}", flush=True)


def _time(case: LookupCase, turn: int) -> float:
    import torch

    from tracer.workloads.models.dlrm import zipf_rows

    random = torch.Generator().manual_seed(zlib.crc32(repr(case).encode()) + turn)
    weight = torch.empty(case.rows * case.tables, case.columns).uniform_(-0.1, 0.1, generator=random)
    count = case.samples * case.bag
    batches = [torch.cat([zipf_rows(case.rows, count, case.skew, random) + table * case.rows
                          for table in range(case.tables)]) for _ in range(BATCHES)]
    starts = torch.arange(0, count * case.tables, case.bag)
    weight.requires_grad_("backward" in case.kind)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("measure", "judge"))
    parser.add_argument("results", type=Path)
    parser.add_argument("--cases", type=int, default=240)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if given.what == "measure":
        measure(given.results, given.cases, given.rounds)


if __name__ == "__main__":
    main()
