"""How long a search for the best plan takes, and whether publishers run what it finds.

    python benchmarks/plan_search.py [DATA] [--rows speed|publishers]

speed: searches in this process and as a command: plans considered, estimated and seconds. What the first search of a
process pays once (imports, compiling) is told apart by a small search before.

publishers: NVIDIA's pre-training jobs on H100 (`end_to_end/dgxc_step_times.parquet` of DATA, as `weak_scaling.py` reads
it), of each series the smallest and the largest. Asked: the published plan's estimate is within 5% of the best plan's
found for the same model, batch and GPUs, of all frameworks and of the publisher's own. Where it is not, the parts that
separate the two are printed, and how much of the memory the best one needs. Nothing is fitted.
"""

from __future__ import annotations

import argparse
import subprocess
import sysconfig
import time
from pathlib import Path

from weak_scaling import DATA, Job, dgx_jobs

from kernel_models.collectives import CollectiveModel, topology_of
from kernel_models.device import device
from planner.parallel.decoder import read_decoder
from planner.parallel.estimate import estimate
from planner.parallel.layer_costs import LayerCosts
from planner.parallel.memory import fullest_of
from planner.parallel.plan_costs import costs_of_plan
from planner.parallel.search import search, separation, tied
from planner.parallel.space import Framework
from tracer.parallel_plan import ParallelPlan
from tracer.shape_only.transformer import TransformerShape

DEVICE = "h100-sxm"
WITHIN = 1.05
SEARCHES = [("llama", "70b", 64, 128), ("llama", "70b", 1024, 1024), ("llama", "70b", 16_384, 16_384),
            ("gpt2", "175b", 1024, 1536), ("moe", "8x7b", 256, 512), ("qwen3-30b-a3b", None, 16, 32),
            ("deepseek-v3", None, 2048, 2048)]
"""Workload or published model, preset, GPUs and sequences of a step."""
COMMAND = ["plan", "llama", "--preset", "70b", "--device", DEVICE]


def speed() -> None:
    """Print what searches take."""
    spec = device(DEVICE)
    started = time.perf_counter()
    small = TransformerShape(2, 64, 2, 2, 128, 256, 64)
    search(small, 2, 2, LayerCosts(spec), CollectiveModel(topology_of(spec, 2)))
    print(f"once a process: {time.perf_counter() - started:.1f} s")
    print(f"{'search':28}{'plans':>9}{'estimated':>11}{'refused':>9}{'slower':>9}{'seconds':>9}{'of CPU':>9}"
          f"{'10,000 plans':>14}")
    for name, model, gpus, batch in SEARCHES:
        shape = read_decoder(name, (), model)[1]
        started, worked = time.perf_counter(), time.process_time()
        found = search(shape, gpus, batch, LayerCosts(spec), CollectiveModel(topology_of(spec, gpus)))
        seconds, busy = time.perf_counter() - started, time.process_time() - worked
        refused = sum(each.count for each in found.refused)
        print(f"{f'{name} {model or str()} on {gpus:,}':28}{found.considered:>9,}{len(found.plans):>11,}{refused:>9,}"
              f"{found.slower:>9,}{seconds:>9.1f}{busy:>9.1f}{seconds / found.considered * 1e4:>12.1f} s")
    for gpus in (64, 1024, 16_384):
        words = [*COMMAND, "--gpus", str(gpus), "--global-batch", str(2 * gpus)]
        started = time.perf_counter()
        foretrace = str(Path(sysconfig.get_path("scripts"), "foretrace"))
        subprocess.run([foretrace, *words], check=True, capture_output=True)
        print(f"foretrace {' '.join(words)}: {time.perf_counter() - started:.1f} s")


def publishers(data: Path) -> None:
    """Print what is found beside what publishers ran."""
    spec, within, own_within, cases = device(DEVICE), 0, 0, 0
    pieces = LayerCosts(spec)
    limit = spec.memory_gb * 1e9
    series: dict[str, list[Job]] = {}
    for job in dgx_jobs(data / "end_to_end" / "dgxc_step_times.parquet"):
        series.setdefault(job.series, []).append(job)
    for jobs in series.values():
        jobs.sort(key=lambda job: job.plan.world_size)
        for job in (jobs[0], jobs[-1]):
            shape, plan, gpus, batch = job.shape, job.plan, job.plan.world_size, job.plan.global_batch
            cluster = CollectiveModel(topology_of(spec, gpus))
            published = estimate(costs_of_plan(plan, shape, pieces, cluster))
            needs = fullest_of(plan, shape, pieces).account.total
            print(f"\n{job.name} GPUs, {batch:,} sequences (measured {job.seconds:.2f} s)")
            _line("published", plan, published.time_us, needs, limit)
            # MaxText's recipe is FSDP alone.
            own = Framework.FSDP if "maxtext" in job.series else Framework.MEGATRON
            cases += 1
            for framework in (None, own):
                found = search(shape, gpus, batch, pieces, cluster, framework=framework)
                best = found.plans[0]
                _line(f"best of {framework.value if framework else 'all'}", best.plan, best.estimate.time_us,
                      best.memory.total, limit)
                close = published.time_us <= WITHIN * best.estimate.time_us
                within += close and framework is None
                own_within += close and framework is own
                told = " (less than the difference's own uncertainty)" if tied(best.estimate, published) else ""
                print(f"    published against it {separation(best.estimate, published)}{told}")
    print(f"\nwithin 5% of the best of all: {within} of {cases}; of the best of the publisher's framework (MaxText: "
          f"FSDP): {own_within} of {cases}")


def _line(name: str, plan: ParallelPlan, us: float, needs: float, limit: float) -> None:
    fits = "" if needs <= limit else ", refused"
    print(f"  {name:20}{us / 1e6:>8.3f} s {needs / 1e9:>6.1f} GB ({needs / limit:.0%}{fits})  {plan}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--rows", choices=["speed", "publishers", "all"], default="all")
    options = parser.parse_args()
    if options.rows != "publishers":
        speed()
    if options.rows != "speed":
        publishers(options.data)


if __name__ == "__main__":
    main()
