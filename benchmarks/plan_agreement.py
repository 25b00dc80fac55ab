"""Ways to a plan's time beside each other: its estimate from pieces, the same pieces as ranks' programs on the
simulator, and the step traced in a fake world and simulated.

    python benchmarks/plan_agreement.py [--plans PLAN ...]
    python benchmarks/plan_agreement.py --published [DATA]     # estimate and simulator on all published steps

The suite's Llama (width 4,096, 4 blocks, 2 sequences of 4,096 tokens, bf16) on H100, data sheets for both. The traced
program is eager PyTorch with DTensor and FSDP2, the estimate's pieces are Megatron-Core's; pieces are priced unfused
here (`fused` off), as the program runs them. Printed: all times, what the estimate says more or less than the traced
step, and whether each lies in the other's 80% interval; of published steps (`plan_intervals.py` has them) how far
estimate and simulator are apart, and how far each is from what was measured.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import pandas
from plan_intervals import published
from typer.testing import CliRunner
from weak_scaling import DATA

from foretrace.commands import app
from kernel_models.collectives import CollectiveModel, find_topology
from kernel_models.device import device
from planner.parallel.decoder import decoder_of
from planner.parallel.estimate import Rates, estimate
from planner.parallel.loads import loads_of
from planner.parallel.pieces import LayerPieces
from planner.parallel.simulated_plan import simulate_plan
from tracer import workloads
from tracer.parallel_plan import ParallelPlan

DEVICE, NODE, LAUNCH_US = "h100-sxm", "dgx-h100", 15.0
SIZES = ["width=4096", "depth=4", "heads=32", "kv_heads=8", "hidden=14336", "vocabulary=32000", "seq=4096", "batch=2",
         "dtype=bf16"]
PLANS = ["ddp=1", "ddp=8", "fsdp2=8", "tp=4", "ddp=2,tp=4", "fsdp2=4,tp=2", "pp=2,microbatches=2",
         "ddp=4,pp=2,microbatches=2"]


def simulated(text: str, folder: Path) -> tuple[float, float, float]:
    """Milliseconds of the traced step and the ends of its interval."""
    words = [word for size in SIZES for word in ("--set", size)]
    size = ParallelPlan.parse(text).world_size
    spread = ["--parallel", text, "--world-size", str(size)] if size > 1 else []
    out = folder / text.replace(",", "_")
    for command in (["trace", "--workload", "llama", *words, "--device", DEVICE, *spread, "-o", str(out)],
                    ["predict", str(out), *(["--topology", NODE] if size > 1 else []), "--json"]):
        ran = CliRunner().invoke(app, command)
        if ran.exit_code:
            raise SystemExit(f"foretrace {' '.join(command)}: {ran.output}")
    found = json.loads(ran.stdout)
    return found["step_time_us"] / 1e3, *(each / 1e3 for each in found["interval_us"])


def report_published(data: Path) -> None:
    """Print, by table, the estimate over the simulated step, and both beside what was measured."""
    rows = []
    for table, series, loads, measured_us in published(data):
        found = estimate(loads).time_us, simulate_plan(loads, Rates()).time_us
        rows.append({"table": table, "series": series, "plan": str(loads.plan), "apart": found[0] / found[1] - 1,
                     **{name: us / measured_us - 1 for name, us in zip(("estimate", "simulated"), found, strict=True)}})
    frame = pandas.DataFrame(rows)
    print(f"{'table':16}{'steps':>6}   estimate over simulated: {'median':>7}{'p10':>7}{'p90':>7}{'most':>7}   "
          f"{'MAPE of the estimate':>21}{'of the simulated':>18}")
    for name, group in [*frame.groupby("table"), ("all", frame)]:
        apart = group["apart"]
        print(f"{name:16}{len(group):>6}{'':28}{apart.median():>+7.1%}{apart.quantile(0.1):>+7.1%}"
              f"{apart.quantile(0.9):>+7.1%}{apart[apart.abs().idxmax()]:>+7.1%}{group['estimate'].abs().mean():>24.1%}"
              f"{group['simulated'].abs().mean():>18.1%}")
    print("farthest apart:")
    for row in frame.sort_values("apart", key=abs).tail(8).itertuples():
        print(f"  {row.table} {row.series} {row.plan}: {row.apart:+.1%}, measured against the estimate "
              f"{row.estimate:+.1%}, the simulated {row.simulated:+.1%}")


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", nargs="+", default=PLANS)
    parser.add_argument("--published", type=Path, nargs="?", const=DATA, help="folder of the tables")
    given = parser.parse_args()
    if given.published:
        report_published(given.published)
        return
    settings = workloads.as_plain(workloads.parse("llama", SIZES, preset="real"))
    shape = replace(decoder_of("llama", settings), fused=False)
    pieces, cluster = LayerPieces(device(DEVICE)), CollectiveModel(find_topology(NODE))
    rates = replace(Rates(), host_us=LAUNCH_US, host_collective_us=LAUNCH_US, jitter=0.0)
    print(f"{'plan':28}{'simulated':>10}{'80% between':>20}{'estimated':>11}{'80% between':>20}{'difference':>12}"
          f"{'its program':>13}")
    with tempfile.TemporaryDirectory() as folder:
        for text in given.plans:
            ms, low, high = simulated(text, Path(folder))
            plan = ParallelPlan.parse(text)
            plan = replace(plan, microbatch=2 // plan.passes)
            loads = loads_of(plan, shape, pieces, cluster)
            e, engine = estimate(loads, rates), simulate_plan(loads, rates)
            mutual = low <= e.time_us / 1e3 <= high and e.low_us <= ms * 1e3 <= e.high_us
            print(f"{text:28}{ms:>10.1f}{f'{low:.1f} – {high:.1f}':>20}{e.time_us / 1e3:>11.1f}"
                  f"{f'{e.low_us / 1e3:.1f} – {e.high_us / 1e3:.1f}':>20}{e.time_us / 1e3 / ms - 1:>+12.1%}"
                  f"{engine.time_us / 1e3:>13.1f}{'' if mutual else '  outside'}")


if __name__ == "__main__":
    main()
