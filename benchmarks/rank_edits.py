"""A single-process capture spread over ranks, against captures of fake worlds of the same plan: every collective.

    python benchmarks/rank_edits.py [--ranks 2 4 64]

One process captures a step of the suite's Llama alone; `on_ranks` spreads it under each plan. Beside it the same
plan is run, with real values and PyTorch's own DDP, FSDP2 and DTensor, as one rank of a fake world under the profiler,
and captured. Compared, in order, for the first and the last rank: kind, members, dtype, bytes in and out. The first
recorded step is the job's fourth, when DDP has rebuilt its buckets.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from pathlib import Path

from graph_predictor.request.parallel_ranks import on_ranks
from graph_predictor.synthesis.baseline import baseline_of
from tracer import workloads
from tracer.capture import Capture, CaptureOptions
from tracer.capture.script import run_workload
from tracer.capture_layout import read_window
from tracer.fake_world import check_plan
from tracer.graph import ExecutionGraph
from tracer.job import read_job
from tracer.parallel_plan import ParallelPlan, PlanError

OPTIONS = CaptureOptions(steps=1, warmup=3, timed=0, execution_trace="none")
SETTINGS = {"depth": 3, "heads": 64, "kv_heads": 64, "width": 512, "hidden": 1024, "seq": 16, "batch": 4,
            "vocabulary": 2048}
"""Sizes that 64 shards divide, and more than one DDP bucket."""
PLANS = {2: ("ddp=2", "ddp=2,bucket_mb=3", "fsdp2=2", "tp=2", "pp=2"),
         4: ("ddp=4", "fsdp2=4", "tp=4", "fsdp2=2,tp=2", "ddp=2,pp=2"),
         64: ("ddp=64", "ddp=64,bucket_mb=50", "fsdp2=64", "tp=64", "fsdp2=8,tp=8")}

Collective = tuple[str, str, str, int, int]


def collectives(graph: ExecutionGraph) -> list[Collective]:
    """Kind, members, dtype, elements in and out of a step's collectives, in order."""
    table = graph.collectives
    return [(graph.string(int(table.kind[row])), graph.string(int(table.ranks[row])),
             graph.string(int(table.dtype[row])), int(table.elements_in[row]), int(table.elements_out[row]))
            for row in range(len(table))]


def difference(edited: list[Collective], fake: list[Collective]) -> str:
    """The first difference, or how many are equal."""
    for number, (mine, theirs) in enumerate(zip(edited, fake, strict=False)):
        if mine != theirs:
            return f"DIFFERENT at {number}: {mine} and {theirs}"
    return f"{len(fake)} equal" if len(edited) == len(fake) else f"DIFFERENT: {len(edited)} and {len(fake)}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=list(PLANS))
    warnings.simplefilter("ignore")
    settings = workloads.configure("llama", **SETTINGS)
    print(f"{'plan':16}{'rank':>6}  {'collectives':60}")
    with tempfile.TemporaryDirectory() as folder:
        run_workload(settings, Capture(f"{folder}/alone", OPTIONS))
        baseline = baseline_of(read_job(f"{folder}/alone"))
        for count in parser.parse_args().ranks:
            for text in PLANS[count]:
                plan = ParallelPlan.parse(text, count)
                try:
                    check_plan(settings, plan)
                except PlanError as error:
                    print(f"{text:16}{'':>6}  {error}")
                    continue
                spread = on_ranks(baseline, plan, also=[0, count - 1]).built
                by_rank = {graph.meta.rank: graph for graph in spread.graphs}
                for rank in (0, count - 1):
                    out = Path(folder) / text
                    run_workload(settings, Capture(out, OPTIONS), plan, (count, rank))
                    fake = collectives(read_window(out / f"rank{rank}"))
                    print(f"{text:16}{rank:>6}  {difference(collectives(by_rank[rank]), fake):60}", flush=True)


if __name__ == "__main__":
    main()
