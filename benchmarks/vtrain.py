"""Iteration times published with vTrain (Bang et al., 2024) from shape-only graphs: tensor, data, pipeline parallelism.

    python benchmarks/vtrain.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with
`end_to_end/vtrain_{single,multi}_node_a100.parquet` and `collectives/all_reduce_vtrain.parquet`: the tables of the
project github.com/VIA-Research/vTrain.

A GPT's pieces (block, embedding, head with Megatron-LM's loss, optimizer) are traced by shapes for every (hidden,
heads, sequence, micro-batch, tp), priced for an A100 80 GB by data sheet with default efficiencies, and put
together by the 1F1B schedule. Collectives within the single node are vTrain's own measured all-reduces, between nodes
those of a DGX A100 by its data sheet. Gradients are reduced after backward (Megatron-LM's default),
attention is not fused, and multi-node rows recompute every block, as the models do not fit otherwise.

*Fitted*: seven `CorrectionFactors` (on products, other kernels, collectives and the network; host time of a launch and
of a collective; how host and GPU meet), by the log ratios' robust least squares with a prior around the
defaults, so that few rows do not run away. In each of five random draws 10% of a table's rows are fitted and the rest
are predicted.

*Leave one size out*: the rows of one model size (hidden and layers) are predicted by rates fitted to 10% of
the rows of the others.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kernel_models.collectives import CollectiveModel, CommProfile, Placement, find_topology, make_measurements
from kernel_models.device import device
from planner.parallel.calibrate import SPREADS, MeasuredPlan, fit_plans
from planner.parallel.corrections import CorrectionFactors
from planner.parallel.estimate import estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.plan_costs import costs_of_plan
from tracer.parallel_plan import ParallelPlan, PlanError, Recomputation
from tracer.shape_only.transformer import TransformerShape

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
VOCABULARY = 51_200
"""GPT-2's 50,257 tokens, padded as Megatron-LM pads them for eight shards."""
SHARE, DRAWS, SEED = 0.1, 5, 20_240
ASKED = {"single": 6.5, "multi": 9.0}
PUBLISHED = {"single": 8.37, "multi": 14.73}

START = CorrectionFactors(host_us=15.0, host_collective_us=50.0, meet=3.0)
"""The rates around which those of a table lie."""
ERROR = {"single": 0.02, "multi": 0.08}
"""Log scale of a row's error against which the prior is weighed, and beyond which errors count by their size, not its
square: single-node rows repeat each other's parts to 1%, of the multi-node ones nothing is known."""
MEBIBYTES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Sizes of vTrain's own measured all-reduces that are taken, of 1,024."""


@dataclass(frozen=True)
class Row:
    """One published row: the size of its model, and its plan's step."""

    size: str
    step: MeasuredPlan


def read(
    path: Path, pieces: LayerCosts, cluster: Callable[[int], CollectiveModel], recompute: Recomputation
) -> list[Row]:
    """The rows of a table that are possible plans."""
    rows: list[Row] = []
    skipped: dict[str, int] = {}
    for r in pd.read_parquet(path).to_dict("records"):
        try:
            rows.append(_row(r, pieces, cluster, recompute))
        except PlanError as error:
            skipped[str(error)] = skipped.get(str(error), 0) + 1
    for reason, count in skipped.items():
        print(f"{count} rows left out: {reason}")
    return rows


def _row(
    r: dict[str, Any], pieces: LayerCosts, cluster: Callable[[int], CollectiveModel], recompute: Recomputation
) -> Row:
    hidden, heads, layers = int(r["hidden size"]), int(r["attention heads"]), int(r["# layers"])
    shape = TransformerShape(layers, hidden, heads, heads, 4 * hidden, VOCABULARY, int(r["sequence length"]),
                             flash=False, dropout=0.1, fused_loss=False, dtype="fp16")
    dp, micro = int(r["data parallelism"]), int(r["micro batch"])
    plan = ParallelPlan(dp=dp, tp=int(r["tensor parallelism"]), pp=int(r["pipeline parallelism"]), microbatch=micro,
                       microbatches=int(r["global batch"]) // dp // micro, recompute=recompute, overlap=False)
    loads = costs_of_plan(plan, shape, pieces, cluster(int(r["# GPUs"])))
    return Row(f"h{hidden} L{layers}", MeasuredPlan(str(plan), loads, float(r["iteration time (ms)"]) * 1e3))


def measured(path: Path) -> CollectiveModel:
    """The node with vTrain's measured all-reduces of two to eight A100."""
    table = pd.read_parquet(path)
    table = table[(table.gpu == "A100") & table.payload_bytes.isin([2**20 * size for size in MEBIBYTES])]
    node = find_topology("dgx-a100")
    return CollectiveModel(node, CommProfile.fit(make_measurements(
        ("all_reduce", dtype, Placement((row.ranks,)), row.payload_bytes, row.latency_us)
        for row in table.itertuples() for dtype in ("float16", "float32")), node))


def fit(rows: Sequence[Row], error: float) -> CorrectionFactors:
    """CorrectionFactors of some rows."""
    return fit_plans([row.step for row in rows], START, error)


def errors(rows: Sequence[Row], rates: CorrectionFactors) -> np.ndarray:
    """Log of predicted over published time."""
    return np.array([row.step.log_ratio(rates) for row in rows])


def _figures(log_ratio: np.ndarray) -> tuple[float, float, float, float, float]:
    """MAPE, median, bias (of signed errors), p90 and largest, percent."""
    signed = 100 * np.expm1(log_ratio)
    size = np.abs(signed)
    return (float(size.mean()), float(np.median(size)), float(signed.mean()), float(np.quantile(size, 0.9)),
            float(size.max()))


def _line(name: str, count: int, log_ratio: np.ndarray) -> None:
    mape, median, bias, p90, worst = _figures(log_ratio)
    print(f"{name:26}{count:>8}{len(log_ratio):>10}{mape:>8.2f}{median:>9.2f}{bias:>+8.2f}{p90:>8.2f}{worst:>8.1f}")


def judge(name: str, rows: list[Row]) -> None:
    """Print a table's errors."""
    print(f"\n{name}: {len(rows)} rows (asked: {ASKED[name]}% MAPE; vTrain's own: {PUBLISHED[name]}%)")
    print(f"{'rates fitted to':26}{'fitted':>8}{'predicted':>10}{'MAPE':>8}{'median':>9}{'bias':>8}{'p90':>8}"
          f"{'max':>8}")
    _line("nothing (defaults)", 0, errors(rows, CorrectionFactors()))
    random = np.random.default_rng(SEED)
    count = int(len(rows) * SHARE)
    found, fitted, by_tp = [], [], defaultdict[int, list[float]](list)
    for draw in range(DRAWS):
        chosen = set(random.choice(len(rows), count, replace=False).tolist())
        rates = fit([rows[i] for i in sorted(chosen)], ERROR[name])
        fitted.append(rates)
        others = [row for i, row in enumerate(rows) if i not in chosen]
        ratio = errors(others, rates)
        for row, each in zip(others, ratio.tolist(), strict=True):
            by_tp[row.step.costs.plan.tp].append(each)
        found.append(_figures(ratio)[0])
        _line(f"10% of the rows, draw {draw + 1}", count, ratio)
    print(f"{'':26}mean of {DRAWS} draws: MAPE {np.mean(found):.2f}%, standard deviation {np.std(found, ddof=1):.2f}")
    for tp in sorted(by_tp):
        _line(f"the draws' rows of tp={tp}", count, np.array(by_tp[tp]))
    for size in sorted({row.size for row in rows}):
        others = [row for row in rows if row.size != size]
        chosen = random.choice(len(others), max(count, len(SPREADS) // 2), replace=False).tolist()
        _line(f"others, not {size}", len(chosen), errors([row for row in rows if row.size == size],
                                                         fit([others[i] for i in sorted(chosen)], ERROR[name])))
    print("CorrectionFactors of each draw: " + "; ".join(
        ", ".join(f"{key} {getattr(rates, key):.3g}" for key in SPREADS) for rates in fitted))
    if name == "multi":
        rates = fitted[0]
        print("\nEvery row, by the rates of draw 1 (its fitted rows among them):")
        for row, ratio in zip(rows, errors(rows, rates).tolist(), strict=True):
            e = estimate(row.step.costs, rates)
            print(f"  {row.size:12}{row.step.name:66}{row.step.us / 1e3:>10,.0f}{e.time_us / 1e3:>10,.0f} ms"
                  f"{100 * np.expm1(ratio):>+8.1f}%  {e.bound}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    data = parser.parse_args().data
    pieces, one = LayerCosts(device("a100-sxm-80g")), measured(data / "collectives" / "all_reduce_vtrain.parquet")
    judge("single", read(data / "end_to_end" / "vtrain_single_node_a100.parquet", pieces, lambda gpus: one,
                         Recomputation.NONE))
    judge("multi", read(data / "end_to_end" / "vtrain_multi_node_a100.parquet", pieces,
                        lambda gpus: CollectiveModel(find_topology(f"dgx-a100x{gpus // 8}")), Recomputation.FULL))


if __name__ == "__main__":
    main()
