"""Step times and peak memory of Megatron-Core steps on eight B200, beside what the simulator SimuMax predicted of them.

    python benchmarks/simumax.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with
`end_to_end/simumax_b200.parquet`: the rows that SimuMax v1.2 publishes (github.com/MooreThreads/SimuMax): Llama 3 70B
and 405B cut to 12 and 4 layers, DeepSeek V2 and V3 cut to 4, bf16, micro-batches of one sequence, distributed
optimizer, fused cross entropy.
Nothing is fitted to them here: kernels by the data sheet and default efficiencies, collectives by a DGX B200's,
`CorrectionFactors()` as they are.

What the rows do not say is taken from the scripts that they were run with (its `simu_tools/megatron_scripts/scripts`):
sequence parallelism with tensor parallelism, 1F1B, gradients accumulated in fp32, collectives of gradients and
parameters beside nothing, no recomputation; 16 heads of keys and values for 405B; one dense layer, then layers with
experts, for both DeepSeek models; tokens padded to the same number for each expert, no prediction modules. Memory is
judged in GiB, the fullest rank's.

Then five rows calibrate the rates as `foretrace plan --calibrate` does, and the others are judged: five random draws,
fixed before looking.

Printed: every row (measured, SimuMax's, ours with its 80% interval, what binds it, memory measured and ours), and for
each family and for all MAPE, median, bias, p90 and largest error of time and memory, and rows inside the interval.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from planner.parallel.calibrate import MeasuredPlan, calibrate
from planner.parallel.corrections import UNCORRECTED, CorrectionFactors
from planner.parallel.decoder import PUBLISHED, decoder_of, decoder_of_config
from planner.parallel.estimate import Estimate, estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.plan_costs import costs_of_plan
from planner.parallel.published_configs import CONFIGS
from tracer.parallel_plan import ParallelPlan, Sharding
from tracer.shape_only.transformer import TransformerShape

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
CALIBRATING, DRAWS = 5, 5
DEVICE, NODE, GPUS = "b200", "dgx-b200", 8
LLAMAS = {"llama3-70b": "70b", "llama3-405b": "405b"}
DEEPSEEKS = {"deepseekv2": "deepseek-v2", "deepseekv3": "deepseek-v3"}
"""Published models by the table's names."""


@dataclass(frozen=True)
class Row:
    """One published step: what ran, what was measured, and what SimuMax predicted; ms and GiB."""

    case: str
    family: str
    shape: TransformerShape
    plan: ParallelPlan
    measured_ms: float
    simumax_ms: float
    measured_gib: float
    simumax_gib: float


@dataclass(frozen=True)
class Judged:
    """A row and our prediction of it; GiB of the fullest rank."""

    row: Row
    estimate: Estimate
    gib: float

    @property
    def time_error(self) -> float:
        """Predicted over measured time, less one."""
        return self.estimate.time_us / 1e3 / self.row.measured_ms - 1

    @property
    def memory_error(self) -> float:
        """Predicted over measured memory, less one."""
        return self.gib / self.row.measured_gib - 1

    @property
    def inside(self) -> bool:
        """Whether the measured time lies in the interval."""
        return self.estimate.low_us <= self.row.measured_ms * 1e3 <= self.estimate.high_us


def shape_of(model: str, layers: int, sequence: int) -> TransformerShape:
    """Return a model of the table, cut to its first layers."""
    if model in LLAMAS:
        heads = {"kv_heads": 16} if model == "llama3-405b" else {}
        return decoder_of("llama", {**PUBLISHED["llama"][LLAMAS[model]], **heads, "seq": sequence}).cut(layers)
    name = DEEPSEEKS[model]
    settings = [f"layers={layers}", f"seq={sequence}", "predictions=0", "imbalance=1"]
    return decoder_of_config({**CONFIGS[name], "first_k_dense_replace": 1}, name, name, settings).shape


def plan_of(parallel: str, micro_batches: int) -> ParallelPlan:
    """Return the plan of a row, such as "tp1ep8pp1" with four micro-batches, on eight GPUs."""
    sizes = {name: int(size) for name, size in re.findall(r"(tp|cp|ep|pp)(\d+)", parallel)}
    dp = GPUS // (sizes.get("tp", 1) * sizes.get("cp", 1) * sizes.get("pp", 1))
    return ParallelPlan(dp=dp, microbatch=1, microbatches=micro_batches, sequence_parallel=sizes.get("tp", 1) > 1,
                        overlap=False,
                        sharding=Sharding.OPTIMIZER if dp * sizes.get("cp", 1) > 1 else Sharding.NONE, **sizes)


def read(data: Path = DATA) -> list[Row]:
    """Return all rows."""
    return [Row(r["case"], r["model"].split("-")[0], shape_of(r["model"], int(r["layers"]), int(r["sequence"])),
                plan_of(r["parallel"], int(r["micro_batches"])), float(r["measured_ms"]), float(r["simumax_ms"]),
                float(r["measured_gib"]), float(r["simumax_gib"]))
            for r in pd.read_parquet(data / "end_to_end" / "simumax_b200.parquet").to_dict("records")]


def judge(rows: Sequence[Row], rates: CorrectionFactors = UNCORRECTED,
          pieces: LayerCosts | None = None) -> list[Judged]:
    """Predict every row."""
    pieces = pieces or LayerCosts(device(DEVICE))
    cluster = CollectiveModel(find_topology(NODE))
    return [Judged(row, estimate(costs_of_plan(row.plan, row.shape, pieces, cluster), rates),
                   fullest_of(row.plan, row.shape, pieces).allocated / 2**30) for row in rows]


def show(judged: Sequence[Judged]) -> None:
    """Print every row, and errors by family."""
    print(f"{'case':52}{'measured':>10}{'SimuMax':>9}{'ours':>9}  {'80% between':>19} {'SimuMax':>8}{'ours':>8}"
          f"  {'GiB':>6}{'ours':>7}{'error':>8}  binds")
    for each in judged:
        row, e = each.row, each.estimate
        print(f"{row.case:52}{row.measured_ms:>10,.1f}{row.simumax_ms:>9,.1f}{e.time_us / 1e3:>9,.1f}  "
              f"{e.low_us / 1e3:>8,.1f} – {e.high_us / 1e3:>8,.1f}{row.simumax_ms / row.measured_ms - 1:>+8.1%}"
              f"{each.time_error:>+8.1%}{' ' if each.inside else '!'} {row.measured_gib:>6.1f}{each.gib:>7.1f}"
              f"{each.memory_error:>+8.1%}  {e.bound}")
    print("! the measured time lies outside the interval\n")
    families = list(dict.fromkeys(each.row.family for each in judged))
    for what, ours, theirs in (
            ("time", lambda each: each.time_error, lambda each: each.row.simumax_ms / each.row.measured_ms - 1),
            ("memory", lambda each: each.memory_error, lambda each: each.row.simumax_gib / each.row.measured_gib - 1)):
        for who, error in (("foretrace", ours), ("SimuMax", theirs)):
            for family in [*families, "all"]:
                mine = [each for each in judged if family in (each.row.family, "all")]
                print(_errors(f"{what:7}{who:10}{family:11}", mine, error)
                      + (f"  inside {sum(each.inside for each in mine)} of {len(mine)}"
                         if (what, who) == ("time", "foretrace") else ""))


def _errors(name: str, judged: Sequence[Judged], error: Callable[[Judged], float]) -> str:
    values = 100 * np.array([error(each) for each in judged])
    size = np.abs(values)
    return (f"{name}{len(size):>3} rows  MAPE {size.mean():5.1f}%  median {np.median(size):5.1f}%  bias "
            f"{values.mean():+6.1f}%  p90 {np.quantile(size, 0.9):5.1f}%  largest {size.max():5.1f}%")


def calibrated(judged: Sequence[Judged], pieces: LayerCosts) -> None:
    """Print the errors of rows that did not calibrate the rates, draw by draw."""
    cluster = CollectiveModel(find_topology(NODE))
    print(f"\nCalibrated on {CALIBRATING} rows, the others judged")
    for draw in range(DRAWS):
        order = np.random.default_rng(draw).permutation(len(judged))
        chosen, others = ([judged[i] for i in part] for part in (order[:CALIBRATING], order[CALIBRATING:]))
        found = calibrate([MeasuredPlan(each.row.case, costs_of_plan(each.row.plan, each.row.shape, pieces, cluster),
                                        1e3 * each.row.measured_ms) for each in chosen])
        again = judge([each.row for each in others], found.rates, pieces)
        print(_errors(f"draw {draw + 1}: foretrace ", again, lambda each: each.time_error))
        print(_errors("        SimuMax   ", again, lambda each: each.row.simumax_ms / each.row.measured_ms - 1))
        print(f"        on {', '.join(each.row.case for each in chosen)}. {found}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    pieces = LayerCosts(device(DEVICE))
    judged = judge(read(parser.parse_args().data), pieces=pieces)
    show(judged)
    calibrated(judged, pieces)


if __name__ == "__main__":
    main()
