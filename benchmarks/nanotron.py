"""Steps of Hugging Face's nanotron benchmark on 8 to 512 H100: an eager framework on its own, measured network.

    python benchmarks/nanotron.py [DATA] [--models held-out|fitted|all] [--rows 69] [--without | --fit | --pairs]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with
`end_to_end/nanotron_h100.parquet`: 1,407 runs of github.com/huggingface/nanotron on nodes of 8 H100 (sequences of
4,096, bf16, gradients in fp32, 256 sequences a step) with each run's measured collectives.

The profile is `planner/parallel/frameworks.toml`'s: `nanotron`, and `nanotron-slow-pipeline` for pipelines of runs
before it was mended (`after_pp_fix`). Bandwidths are each run's own, as `plan --comm-profile` takes them. `--without`
leaves both out: the plan as any framework's on the data sheet's network.

*Fitted* (`--fit`): the profile's rates, by `fit_factors`, to the models of 1.34 and 8.86 billion parameters: runs of a
mended pipeline or none. *Held out*, chosen before their errors were looked at: 3.57 (all runs on one node) and 80
billion. Printed: rows drawn by a seed, every one; then over all rows of the models MAPE, median, bias, p90, largest and
share inside the 80% interval: of one node, all, and the others after a calibration on three rows (two draws of each
model, size of cluster and pipeline); and whether a run fits, right or not, with the Brier score.
`--pairs`: of pairs of runs in one state of the network that differ in one setting, how often the sign of what it
changes is right (`weak_scaling.signs`).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from weak_scaling import Measured, show_signs, signs

from graph_predictor.request.memory_fit import fit_probability
from kernel_models.collectives import CollectiveKind, CollectiveModel, find_topology
from kernel_models.collectives.bandwidths import KINDS, BusBandwidths
from kernel_models.device import device
from planner.parallel.calibrate import MeasuredPlan, calibrate
from planner.parallel.corrections import UNCORRECTED, CorrectionFactors, fit_factors
from planner.parallel.decoder import check_decoder_plan
from planner.parallel.estimate import estimate
from planner.parallel.frameworks import PLAIN, FrameworkProfile, framework_profiles
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.plan_costs import PlanCosts, costs_of_plan
from tracer.parallel_plan import ParallelPlan, PlanError, Sharding
from tracer.shape_only.transformer import TransformerShape

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
MODELS = {"fitted": (1.34, 8.86), "held-out": (3.57, 80.0), "all": (1.34, 3.57, 8.86, 80.0)}
"""Billions of parameters."""
TIED = (1.34, 3.57)
"""Models whose embedding is the head's too (its `scaling_benchmarks.py`); runs out of memory do not say so."""
SEED, DRAWS, THREE = 20_261, 2, 3
WIDTHS = {"collectives": 0.3, "network": 0.5, "host_us": 0.7, "host_collective_us": 0.7, "step_us": 1.0,
          "meeting_us": 1.0, "crossing_us": 1.0, "transfer_us": 1.0, "meet": 0.7}
START = {"collectives": 0.6, "host_us": 50.0, "step_us": 9e4, "meeting_us": 0.9, "crossing_us": 30.0,
         "transfer_us": 200.0, "meet": 10.0}
"""Of the fit: the standard deviation of each factor's logarithm, and where it starts; `meeting_us` is the share of a
hop here."""
MOST_TASKS = 1024
"""Stages × micro-batches of the runs that are fitted: a choice for the fit's time."""
SLOW_HOP_US = 100.0
"""Between the two states of the cluster's network."""
COLUMNS = (("allreduce_gbps", "ar_intra-node_gbps"), ("allgather_gbps", "ag_intra-node_gbps"),
           ("reducescatter_gbps", "rs_intra-node_gbps"))


@dataclass(frozen=True)
class Run:
    """A run of the table, and what its step is made of."""

    row: dict[str, Any]
    costs: PlanCosts
    rates: CorrectionFactors
    hop_us: float

    @property
    def step(self) -> MeasuredPlan:
        """Its measured step."""
        return MeasuredPlan(str(self.costs.plan), self.costs, 1e3 * self.row["step_ms"])


@lru_cache(maxsize=8)
def _pieces(name: str) -> LayerCosts:
    """Return the pieces of a profile."""
    return LayerCosts(device("h100-sxm"), like=None if name == "any" else _pieces("any"), profile=_profile(name))


def _profile(name: str) -> FrameworkProfile:
    return framework_profiles().get(name, PLAIN)


def shape_of(row: dict[str, Any]) -> TransformerShape:
    """The model of a run."""
    heads = int(row["num_heads"])
    return TransformerShape(
        int(row["num_layers"]), int(row["hidden_size"]), heads, int(heads if pd.isna(row["num_kv_heads"]) else row[
            "num_kv_heads"]), int(row["interm_dim"]), int(row["vocab_size"]), int(row["seq_len"]), gated=True, rms=True,
        bias=False, rotary=True, tied=row["num_params"] in TIED)


def plan_of(row: dict[str, Any]) -> ParallelPlan:
    """The plan of a run."""
    tp = int(row["tp"])
    return ParallelPlan(dp=int(row["dp"]), tp=tp, pp=int(row["pp"]), microbatch=int(row["mbs"]),
                        microbatches=int(row["batch_accum"]), sharding=Sharding(int(row["zero_stage"])),
                        sequence_parallel=tp > 1)


def profile_of(row: dict[str, Any], without: bool = False) -> FrameworkProfile:
    """The profile that carried a run out."""
    return _profile("any" if without else "nanotron-slow-pipeline" if row["pp"] > 1 and not row[
        "after_pp_fix"] else "nanotron")


def cluster_of(row: dict[str, Any], without: bool = False) -> CollectiveModel:
    """The nodes of a run, with what was measured on them."""
    nodes = int(row["dp"] * row["tp"] * row["pp"]) // 8
    on = find_topology("dgx-h100" if nodes <= 1 else f"dgx-h100x{nodes}")
    found: dict[tuple[CollectiveKind, int], float] = {}
    for kind, (everywhere, inside) in zip(KINDS, COLUMNS, strict=True):
        found[kind, 1], found[kind, nodes] = row[inside], row[inside if nodes == 1 else everywhere]
    return CollectiveModel(on, bandwidths=None if without else BusBandwidths(found))


def read(data: Path, models: Sequence[float], status: str = "Success") -> list[dict[str, Any]]:
    """The rows of some models that ended so and are complete."""
    table = pd.read_parquet(data / "end_to_end" / "nanotron_h100.parquet")
    return table[(table.status == status) & table.num_params.isin(models) & table.interm_dim.notna()].to_dict("records")


def runs_of(rows: Sequence[dict[str, Any]], without: bool = False) -> list[Run]:
    """Price what runs are made of; those that cannot be planned are named."""
    found = []
    for row in rows:
        profile, on = profile_of(row, without), cluster_of(row, without)
        try:
            costs = costs_of_plan(profile.planned(plan_of(row)), profile.shaped(shape_of(row)),
                                  _pieces(profile.name), on)
        except PlanError as error:
            print(f"left out: {plan_of(row)}: {error}")
            continue
        hop = 0.0 if on.bandwidths is None else on.bandwidths.on(on.topology).hop_us
        found.append(Run(row, costs, profile.rated(UNCORRECTED, on), hop))
    return found


def fit(runs: Sequence[Run]) -> CorrectionFactors:
    """Fit the profile's rates; ``meeting_us`` of the result is the share of a hop."""
    usual = _profile("nanotron").meeting["usual_us"]
    used = [run for run in runs if (run.row["pp"] == 1 or run.row["after_pp_fix"])
            and run.costs.plan.pp * run.costs.plan.passes <= MOST_TASKS]

    def ratios(rates: CorrectionFactors) -> np.ndarray:
        return np.array([run.step.log_ratio(replace(
            rates, meeting_us=rates.meeting_us * max(run.hop_us - usual, 0.0))) for run in used])

    return fit_factors(ratios, replace(UNCORRECTED, **START), WIDTHS, 0.08)


def judged(runs: Sequence[Run], rates_of: Callable[[Run], CorrectionFactors]) -> pd.DataFrame:
    """Error of each run, %, and whether it is inside."""
    found = [(estimate(run.costs, rates_of(run)), 1e3 * run.row["step_ms"]) for run in runs]
    return pd.DataFrame([(100 * (e.time_us / us - 1), e.low_us <= us <= e.high_us, e.time_us / 1e3, e.bound)
                         for e, us in found], columns=["error", "inside", "ms", "bound"])


def line(name: str, table: pd.DataFrame) -> None:
    """Print the figures of some rows."""
    size = table.error.abs()
    print(f"{name:34}{len(table):>6}{size.mean():>7.1f}%{size.median():>7.1f}%{table.error.mean():>+7.1f}%"
          f"{size.quantile(0.9):>7.1f}%{size.max():>7.0f}%{table.inside.mean():>8.0%}")


def after_three(runs: Sequence[Run]) -> pd.DataFrame:
    """Calibrate on three drawn runs of a model on some nodes in one state of pipeline and network, judge the others."""
    groups: dict[object, list[Run]] = {}
    for run in runs:
        state = profile_of(run.row).name, run.hop_us > SLOW_HOP_US
        groups.setdefault((run.row["num_params"], run.row["nodes"], *state), []).append(run)
    random, found = np.random.default_rng(SEED), []
    for group in groups.values():
        for _ in range(DRAWS if len(group) > 2 * THREE else 0):
            chosen = set(random.choice(len(group), THREE, replace=False).tolist())
            taken = [group[i].step for i in sorted(chosen)]
            learned = calibrate(taken, group[0].rates, _profile("nanotron").widths).rates
            found.append(judged([run for i, run in enumerate(group) if i not in chosen],
                                lambda run, to=learned: replace(to, meeting_us=run.rates.meeting_us)))
    return pd.concat(found)


def memory(rows: Sequence[dict[str, Any]]) -> None:
    """Print how often it is known whether a run fits."""
    found, limit = [], device("h100-sxm").memory_gb * 1e9
    for row in rows:
        profile, on = profile_of(row), cluster_of(row, without=True)
        plan, shape = profile.planned(plan_of(row)), profile.shaped(shape_of(row))
        try:
            check_decoder_plan(plan, shape, on.topology)
            sure = fit_probability(fullest_of(plan, shape, _pieces(profile.name)), limit)
            found.append((sure, row["status"] == "Success"))
        except PlanError:
            continue
    said, true = np.array(found).T
    right = (said > 0.5) == (true > 0.5)
    print(f"\nfits or not: {len(found)} runs, {int(true.sum())} of which did; {right.mean():.1%} right ("
          f"{int(((said <= 0.5) & (true > 0.5)).sum())} that ran refused), Brier {np.mean((said - true) ** 2):.3f}")


def main() -> None:
    """Print the table, or the fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--models", choices=list(MODELS), default="held-out")
    parser.add_argument("--rows", type=int, default=69)
    parser.add_argument("--without", action="store_true")
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--pairs", action="store_true")
    options = parser.parse_args()
    if options.fit:
        rates = fit(runs_of(read(options.data, MODELS["fitted"])))
        print("\n".join(f"{name} {getattr(rates, name):.4g}" for name in WIDTHS))
        return
    rows = read(options.data, MODELS[options.models])
    runs = runs_of(rows, options.without)
    table = judged(runs, lambda run: run.rates)
    if options.pairs:
        show_signs("nanotron", signs([Measured.of(
            run.costs.shape, plan_of(run.row), (profile_of(run.row).name, run.hop_us > SLOW_HOP_US), run.row["step_ms"],
            ms) for run, ms in zip(runs, table.ms.tolist(), strict=True)]))
        return
    for i in sorted(np.random.default_rng(SEED).permutation(len(runs))[:options.rows].tolist()):
        run, got = runs[i], table.iloc[i]
        print(f"{run.row['num_params']:5g}B {int(run.row['nodes']):3d} nodes {plan_of(run.row)!s:74}"
              f"{run.row['step_ms']:>10,.0f}{got.ms:>10,.0f} ms{got.error:>+8.1f}%  {got.bound}"
              f"{', outside' * (not got.inside)}")
    print(f"\n{'':34}{'rows':>6}{'MAPE':>8}{'median':>8}{'bias':>8}{'p90':>8}{'max':>8}{'inside':>8}")
    for name, chosen in (("one node", [run.row["nodes"] == 1 for run in runs]), ("all", [True] * len(runs)),
                         ("pipeline as mended, or none", [profile_of(run.row).name == "nanotron" for run in runs])):
        if any(chosen):
            line(name, table[np.array(chosen)])
    if not options.without:
        line("after three rows, the others", after_three(runs))
        memory(rows + read(options.data, MODELS[options.models], "OOM"))


if __name__ == "__main__":
    main()
