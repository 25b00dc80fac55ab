"""How often published steps lie inside the 80% intervals of their estimates; fits ``PlanSpreads`` too.

    python benchmarks/plan_intervals.py [DATA]

DATA as for `weak_scaling.py`. Steps: its two tables, SimuMax's B200 (`simumax.py`) and vTrain's A100 (`vtrain.py`), all
by `CorrectionFactors()`. Half of the series, those with an even checksum, fit the spreads by largest likelihood, each
table counting as much; the other half is judged. Then tables are left out: fitted to the others, judged on one.

Printed: rows inside by table for both halves and for tables left out, pooled, and the fitted spreads.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import simumax
import vtrain
from scipy.optimize import minimize
from weak_scaling import DATA, dgx_jobs, mpt_jobs

from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from planner.parallel.corrections import Z80, PlanSpreads
from planner.parallel.estimate import estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.plan_costs import PlanCosts, costs_of_plan
from tracer.parallel_plan import Recomputation

PRIOR = PlanSpreads(0.05, 0.1, 0.3, 0.3, 0.7)
"""About where spreads lie; a table that says nothing of one leaves it there."""
PRIOR_WEIGHT = 0.1


@dataclass(frozen=True)
class Case:
    """One published step: log of estimated over measured time, and the shares of the working step."""

    table: str
    fits: bool
    error: float
    shares: tuple[float, float, float, float]


def case(table: str, series: str, loads: PlanCosts, measured_us: float) -> Case:
    """Judge one step."""
    found = estimate(loads)
    working = found.time_us - found.pipeline
    shares = (found.products, found.others + found.optimizer, found.exposed_us, max(found.host, 0.0))
    return Case(table, zlib.crc32(series.encode()) % 2 == 0, float(np.log(found.time_us / measured_us)),
                tuple(each / working for each in shares))  # type: ignore[arg-type]


def published(data: Path) -> Iterator[tuple[str, str, PlanCosts, float]]:
    """All published steps: table, series, what the plan's step is made of, measured µs."""
    folder = data / "end_to_end"
    pieces: dict[str, LayerCosts] = {}
    for job in dgx_jobs(folder / "dgxc_step_times.parquet") + mpt_jobs(folder / "mosaic_mpt_fsdp.parquet"):
        own = pieces.setdefault(job.device, LayerCosts(device(job.device)))
        name = "dgxc H100" if "training" in job.table else f"MPT {job.table[:4]}"
        yield name, job.series, costs_of_plan(job.plan, job.shape, own, job.cluster), 1e6 * job.seconds
    a100, node = pieces["a100-sxm-80g"], vtrain.measured(data / "collectives" / "all_reduce_vtrain.parquet")
    for name, cluster, again in (
            ("single", lambda gpus: node, Recomputation.NONE),
            ("multi", lambda gpus: CollectiveModel(find_topology(f"dgx-a100x{gpus // 8}")), Recomputation.FULL)):
        for row in vtrain.read(folder / f"vtrain_{name}_node_a100.parquet", a100, cluster, again):
            yield f"vTrain {name}", row.size, row.step.costs, row.step.us
    b200, cluster = LayerCosts(device(simumax.DEVICE)), CollectiveModel(find_topology(simumax.NODE))
    for row in simumax.read(data):
        yield ("SimuMax B200", row.case.rsplit("_mbc", 1)[0], costs_of_plan(row.plan, row.shape, b200, cluster),
               1e3 * row.measured_ms)


def cases(data: Path) -> list[Case]:
    """All published steps, judged."""
    return [case(*each) for each in published(data)]


def fit(steps: list[Case]) -> PlanSpreads:
    """PlanSpreads of largest likelihood, every table counting as much."""
    size = {name: sum(each.table == name for each in steps) for name in {each.table for each in steps}}
    weight = np.array([1 / size[each.table] for each in steps])
    squares = np.array([(1.0, *each.shares) for each in steps]) ** 2
    error = np.array([each.error for each in steps])
    prior = np.log([getattr(PRIOR, each.name) for each in fields(PRIOR)])

    def lack(logs: np.ndarray) -> float:
        variance = squares @ np.exp(2 * logs)
        strange = PRIOR_WEIGHT * float(((logs - prior) ** 2).sum())
        return float((weight * (np.log(variance) + error**2 / variance)).sum()) + strange

    return PlanSpreads(*np.exp(minimize(lack, prior, method="Nelder-Mead", options={"maxiter": 9000}).x).tolist())


def inside(steps: list[Case], spreads: PlanSpreads) -> np.ndarray:
    """Which steps lie inside."""
    return np.array([abs(each.error) <= Z80 * spreads.of(*each.shares) for each in steps])


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    found = cases(parser.parse_args().data)
    tables = sorted({each.table for each in found})
    fitted = fit([each for each in found if each.fits])
    print(f"fitted to {sum(each.fits for each in found)} steps: {fitted}\nshipped: {PlanSpreads()}\n")
    print(f"{'table':16}{'rows':>6}{'bias':>8}{'fitted':>8}{'inside':>8}{'judged':>8}{'inside':>8}{'left out':>10}")
    judged, alone = [], []
    for name in tables:
        mine = [each for each in found if each.table == name]
        own, others = ([each for each in mine if each.fits is fits] for fits in (True, False))
        without = inside(mine, fit([each for each in found if each.table != name]))
        judged.append(inside(others, PlanSpreads()))
        alone.append(without)
        print(f"{name:16}{len(mine):>6}{np.mean([each.error for each in mine]):>+8.1%}{len(own):>8}"
              f"{inside(own, PlanSpreads()).mean():>8.0%}{len(others):>8}{judged[-1].mean():>8.0%}"
              f"{without.mean():>10.0%}")
    print(f"{'pooled':38}{'':>8}{sum(map(len, judged)):>8}{np.concatenate(judged).mean():>8.0%}"
          f"{np.concatenate(alone).mean():>10.0%}\n{'mean of tables':38}{'':>16}"
          f"{np.mean([each.mean() for each in judged]):>8.0%}{np.mean([each.mean() for each in alone]):>10.0%}")


if __name__ == "__main__":
    main()
