"""Each collective by the backend that is best for it, against one backend for all: choices on sizes left out.

    python benchmarks/mixed_backends.py [DATA]

DATA as of ``benchmarks/collectives.py``. All-reduce on H200 in half precision, NCCL 2.29 and the kernels of SGLang,
vLLM and TensorRT-LLM (AIConfigurator's measurements), in three pools of backends that one step could mix. The rule,
written before any result was looked at: of the sizes that all backends of a pool have, ascending, every second one is
left out of all of them, and the backends are fitted to the rest. A choice is right if the backend that is chosen for a
left-out size is the one that was measured to be the fastest; *with ties* also if it was measured to be at most 1%
slower. Its regret is what it takes longer than the fastest. Choices are without the switch between backends, which no
measurement has. A choice is *sure* where it leads all others by more than the 80% intervals of the two.

Then the collectives of two recorded jobs of eight GPUs, with ``auto``: NCCL's algorithms by formula.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import pandas as pd
from collectives import DATA, custom_all_reduce, nccl

from graph_predictor.comm.mixing import Mixture, mixture_of_step
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.collectives import CollectiveMeasurements, CollectiveModel, CommProfile, find_topology
from kernel_models.collectives.measurements import join
from kernel_models.collectives.price import Backends
from tracer.job import read_job

TIE = 0.01
ASKED_RIGHT, ASKED_REGRET = 0.95, 0.02
GPU, NODE = "H200-SXM-141GB", "dgx-h200"
POOLS = {
    "in CUDA graphs": ("nccl", "SGLang_CustomAllReduce_graph", "TRTLLM", "vLLM_custom_graph"),
    "eager": ("nccl", "SGLang_CustomAllReduce_eager", "vLLM_custom_eager"),
    "custom kernels alone": ("SGLang_CustomAllReduce_eager", "SGLang_CustomAllReduce_graph", "TRTLLM",
                             "vLLM_custom_eager", "vLLM_custom_graph")}
JOBS = {"dlrm-8xV100-2023": "dgx-v100", "nanogpt-8xH100": "dgx-h100"}


def left_out_choices(rows: CollectiveMeasurements, pool: tuple[str, ...]) -> pd.DataFrame:
    """One row a left-out size and number of ranks: the fastest backend as measured, the one that is chosen, the regret
    of that and of each single backend."""
    rows = join(rows.of_backend(name) for name in pool).aggregated()
    keys = [(int(ranks), float(size)) for ranks, size in zip(rows.batch.ranks, rows.batch.payload_bytes, strict=True)]
    measured = {(name, *key): us for name, key, us in zip(rows.backend, keys, rows.time_us.tolist(), strict=True)}
    left = set()
    for ranks in sorted({ranks for ranks, _ in keys}):
        sizes = sorted(set.intersection(*({s for n, r, s in measured if n == name and r == ranks} for name in pool)))
        left |= {(ranks, size) for size in sizes[1::2]}
    out = np.array([key in left for key in keys])
    profile = CommProfile.fit(rows.take(~out), find_topology(NODE))
    one = rows.take(out).of_backend(pool[0])
    choices = Backends(find_topology(NODE), profile, switch_us=0.0).choose(one.batch)
    found = []
    for i, key in enumerate(zip(one.batch.ranks.tolist(), one.batch.payload_bytes.tolist(), strict=True)):
        times = {name: measured[(name, *key)] for name in pool}
        best = min(times, key=lambda name: times[name])
        chosen = choices.names[choices.winner[i]]
        found.append({"ranks": key[0], "bytes": key[1], "fastest": best, "chosen": chosen, "us": times[chosen],
                      "sure": bool(choices.sure[i]), "best_us": times[best],
                      **{f"only {name}": us for name, us in times.items()}})
    return pd.DataFrame(found).sort_values(["ranks", "bytes"])


def show_choices(name: str, cases: pd.DataFrame, pool: tuple[str, ...]) -> None:
    """Print every case and what they add up to."""
    print(f"\n{name}: {len(cases)} left-out sizes\n{'ranks':>5}{'bytes':>12}  {'fastest':30}{'us':>9}  {'chosen':30}"
          f"{'us':>9}  regret")
    for row in cases.itertuples():
        print(f"{row.ranks:5}{row.bytes:12,.0f}  {row.fastest:30}{row.best_us:9.2f}  {row.chosen:30}{row.us:9.2f}"
              f"{row.us / row.best_us - 1:8.2%}{'' if row.fastest == row.chosen else '  *'}")
    regret = cases["us"] / cases["best_us"] - 1
    right = cases["fastest"] == cases["chosen"]
    strict, tied = right.mean(), (regret <= TIE).mean()
    met = ["met" if each else "missed" for each in (strict >= ASKED_RIGHT, regret.mean() <= ASKED_REGRET)]
    print(f"right {strict:.1%} (with ties within {TIE:.0%} {tied:.1%}; asked {ASKED_RIGHT:.0%}: {met[0]}), regret "
          f"{regret.mean():.2%} mean (asked {ASKED_REGRET:.0%}: {met[1]}), {regret.max():.2%} at most; all together "
          f"{cases['us'].sum() / cases['best_us'].sum() - 1:.2%}")
    print(f"sure: {cases['sure'].sum()} of {len(cases)}, right {right[cases['sure']].mean():.1%}")
    for each in pool:
        single = cases[f"only {each}"] / cases["best_us"] - 1
        print(f"  {each + ' alone':36} regret {single.mean():9.2%} mean, {single.max():9.2%} at most; all together "
              f"{cases[f'only {each}'].sum() / cases['best_us'].sum() - 1:.2%}")


def show_mixture(name: str, found: Mixture) -> None:
    """Print who does what in a recorded job."""
    print(f"\n{name}, auto: {found.headline()}")
    for row in found.rows:
        print(f"  {row.kind.label:15}{row.ranks:3} ranks {row.smallest_bytes:12,.0f} to {row.largest_bytes:12,.0f} B"
              f"{row.calls:8.1f} calls  {row.backend:24}{row.time_us:10.1f} us, by {found.best_single} "
              f"{row.single_us:10.1f}")


def main() -> int:
    """Print every case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    data: Path = parser.parse_args().data
    folder = data / "collectives"
    if not folder.is_dir():
        print(f"{folder} does not exist; name the folder that holds it, or set FORETRACE_DATA.", file=sys.stderr)
        return 2
    everything = nccl(folder)[GPU]
    half = everything.take(everything.batch.dtype == custom_all_reduce(folder).batch.dtype[0])
    rows = join([half.take(half.batch.kind == 0), custom_all_reduce(folder)])
    cases = {name: left_out_choices(rows, pool) for name, pool in POOLS.items()}
    for name, pool in POOLS.items():
        show_choices(name, cases[name], pool)
    every = pd.concat(cases.values())
    regret = every["us"] / every["best_us"] - 1
    sure = every[every["sure"]]
    print(f"\nall pools: {len(every)} cases, right {(every['fastest'] == every['chosen']).mean():.1%}, with ties "
          f"{(regret <= TIE).mean():.1%}, regret {regret.mean():.2%} mean, {regret.max():.2%} at most; of "
          f"{len(sure)} sure ones right {(sure['fastest'] == sure['chosen']).mean():.1%}")
    for job, node in JOBS.items():
        scenario = baseline_of(read_job(data / "traces" / job)).scenario
        show_mixture(job, mixture_of_step(scenario.built, scenario.cycle.kernel, scenario.cycle.steps,
                                          CollectiveModel(find_topology(node), mixed=True)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
