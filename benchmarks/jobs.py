"""A recorded job of eight GPUs: what models say of its collectives, what one rank alone says of its step, and logs.

    python benchmarks/jobs.py DATA

``DATA`` is the folder with ``traces/nanogpt-8xH100``, ``traces/nanogpt-rank0-of-8xH100`` and ``end_to_end``: profiles
and logs of KellerJordan/modded-nanogpt's records of 2025-12-11 and 2025-10-31 on eight H100. Nothing is fitted to them.

Its recorded steps are host playback, as a profiler at work makes them. The rows below are of the step without the
profiler (``--without-profiler``), which its device decides: when the recording began, every rank's host was ahead.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from graph_predictor.comm.recorded_calls import RecordedCollective, find_collectives
from graph_predictor.edits.peers import RanksAlike
from graph_predictor.edits.without_profiler import TakeOutProfiler
from graph_predictor.prediction.predictor import Baseline
from graph_predictor.prediction.result import Prediction
from graph_predictor.prediction.scenario import Edit, Scenario
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import CollectiveModel, price_calls
from kernel_models.collectives.topology import find_topology
from tracer.job import read_job

CLUSTER = "dgx-h100"
LOGGED = {"nanogpt-8xH100": "2025-12-11_NorMuonOptimsAndFixes",
          "nanogpt-rank0-of-8xH100": "2025-10-31_AdamSyncGradientHook"}
"""The record that each trace is of."""


@dataclass(frozen=True)
class ByModel:
    """Each collective whose kind and size are known takes what the model of its cluster says instead of what was
    recorded."""

    model: CollectiveModel

    def describe(self) -> str:
        """One phrase."""
        return "collectives by their model"

    def apply(self, scenario: Scenario) -> Scenario:
        """See ``Edit``."""
        found, _ = find_collectives(scenario.built, self.model.topology)
        program = scenario.built.program
        factor = np.ones(len(program.kernel_item))
        for each, time_us in zip(found, price_calls([one.call for one in found], self.model).time_us.tolist(),
                                 strict=True):
            for position, kernel in each.members:
                row = int(program.kernel_ptr[position]) + kernel
                factor[row] = time_us * 1e3 / max(int(program.kernel_duration[row]), 1)
        return scenario.with_note("By model.", kernels=scenario.kernels.scaled(factor))


def main() -> None:
    """Print every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    data: Path = parser.parse_args().data
    folder = data / "traces" / "nanogpt-8xH100"
    model = CollectiveModel(find_topology(CLUSTER))
    job = baseline_of(read_job(folder))
    found, unknown = find_collectives(job.built, model.topology)
    _transfers(found, unknown, model)
    whole = _predict(job, TakeOutProfiler())
    print(f"\n{'the step, ms':44} recorded  by model   change")
    for name, edits in (("as recorded", ()), ("without the profiler", (TakeOutProfiler(),))):
        old, new = (_predict(job, *edits, *more).step_time_us / 1e3 for more in ((), (ByModel(model),)))
        print(f"{name:44}{old:9.3f}{new:10.3f}{new / old - 1:+9.2%}")
    _one_rank(sorted(folder.glob("*.json.gz")), whole, found)
    _logged(data, whole)


def _transfers(found: list[RecordedCollective], unknown: int, model: CollectiveModel) -> None:
    times = price_calls([each.call for each in found], model)
    rows = pd.DataFrame({
        "kind": [each.call.kind.name.lower() for each in found], "bytes": [each.call.payload_bytes for each in found],
        "measured": [each.recorded_ns / 1e3 for each in found], "model": times.time_us, "low": times.low_us,
        "high": times.high_us})
    rows["error"] = rows["model"] / rows["measured"] - 1
    rows["within"] = (rows["low"] <= rows["measured"]) & (rows["measured"] <= rows["high"])
    print(f"{'collective':16}{'bytes':>12} calls  shortest   median  longest µs    model   error  within")
    for (kind, size), group in rows.groupby(["kind", "bytes"]):
        measured = group["measured"]
        print(f"{kind:16}{size:12,.0f}{len(group):6}{measured.min():10.1f}{measured.median():9.1f}{measured.max():9.1f}"
              f"{group['model'].iloc[0]:12.1f}{group['model'].iloc[0] / measured.median() - 1:+8.1%}"
              f"{group['within'].mean():8.0%}")
    for name, part in (("all", rows), ("of a megabyte or more", rows[rows["bytes"] >= 1 << 20])):
        size = part["error"].abs()
        print(f"{name}: {len(part)} collectives, MAPE {size.mean():.1%}, median {size.median():.1%}, bias "
              f"{part['error'].mean():+.1%}, p90 {size.quantile(0.9):.1%}, worst {size.max():.1%}, "
              f"{part['within'].mean():.0%} in the 80% interval")
    print(f"{unknown} kernels of collectives have no recorded kind or size.")


def _one_rank(files: list[Path], whole: Prediction, found: list[RecordedCollective]) -> None:
    """Each rank as the only one that was recorded, beside the job of all."""
    truth_ms = whole.step_time_us / 1e3
    print(f"\n{'only recorded':16}  as recorded   error   all alike   error  within (all ranks: {truth_ms:.3f} ms)")
    errors = []
    for path in files:
        baseline = baseline_of(read_job(path))
        late, alike = (_predict(baseline, TakeOutProfiler(), *more) for more in ((), (RanksAlike(),)))
        low, high = alike.interval_us
        errors.append(alike.step_time_us / whole.step_time_us - 1)
        print(f"{path.name.split('.')[0]:16}{late.step_time_us / 1e3:13.3f}"
              f"{late.step_time_us / whole.step_time_us - 1:+8.1%}{alike.step_time_us / 1e3:12.3f}{errors[-1]:+8.1%}"
              f"  {'yes' if low <= whole.step_time_us <= high else 'no'}")
    size = np.abs(errors)
    print(f"MAPE {size.mean():.1%}, median {np.median(size):.1%}, bias {np.mean(errors):+.1%}, worst {size.max():.1%}")
    _one_rank_transfers(files, found)


def _one_rank_transfers(files: list[Path], found: list[RecordedCollective]) -> None:
    """Transfers that one rank's recording tells, over those that all ranks' tell (``spreads.TRANSFER_ALONE``)."""
    ratios = []
    for position, path in enumerate(files):
        scenario = baseline_of(read_job(path)).scenario
        factor = RanksAlike().apply(scenario).kernels.factor
        assert factor is not None
        own = scenario.built.program.kernel_duration * factor
        ratios += [float(own[kernel]) / each.recorded_ns for each in found
                   for rank, kernel in each.members if rank == position and each.call.payload_bytes >= 1 << 20]
    logs = np.log(ratios)
    print(f"transfers of a megabyte or more, one rank over all: median {np.exp(np.median(logs)):.2f}, 80% between "
          f"{np.exp(np.quantile(logs, 0.1)):.2f} and {np.exp(np.quantile(logs, 0.9)):.2f} ({len(logs)} cases)")


def _logged(data: Path, whole: Prediction) -> None:
    """Unprofiled steps of the records that the traces are of: the mean of steps 20 to 120 of each run."""
    logs = pd.read_parquet(data / "end_to_end" / "nanogpt_8xH100_step_times.parquet")
    rank0 = baseline_of(read_job(data / "traces" / "nanogpt-rank0-of-8xH100"))
    cases = {"nanogpt-8xH100": {"all ranks": whole},
             "nanogpt-rank0-of-8xH100": {"rank 0": _predict(rank0, TakeOutProfiler()),
                                         "rank 0, all alike": _predict(rank0, TakeOutProfiler(), RanksAlike())}}
    print(f"\n{'unprofiled steps':44} logged (runs)  predicted   error  within")
    for trace, found in cases.items():
        times = logs[logs["record"] == LOGGED[trace]]["ms_20_120"]
        for name, prediction in found.items():
            low, high = prediction.interval_us
            truth = float(times.median())
            print(f"{f'{trace}, {name}':44}{truth:7.3f} ({len(times):2})  {prediction.step_time_us / 1e3:12.3f}"
                  f"{prediction.step_time_us / 1e3 / truth - 1:+8.1%}  {'yes' if low <= truth * 1e3 <= high else 'no'}")


def _predict(baseline: Baseline, *edits: Edit) -> Prediction:
    return baseline.predict(list(edits))


if __name__ == "__main__":
    main()
