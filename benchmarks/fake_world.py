"""1,024 ranks of the suite's Llama as one folded job: seconds to record, save, load and inspect, and its size.

Each case runs in a process of its own; one rank of every class is recorded, the others are folded into it.

    python benchmarks/fake_world.py [--ranks 1024]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CASES = (("captured", "ddp"), ("captured", "fsdp2"), ("shape-only", "ddp"), ("shape-only", "fsdp2"),
         ("shape-only", "fsdp2=512,tp=2"))

ONE = """
import json, os, sys, time, warnings
warnings.simplefilter("ignore")
how, text, ranks, out = json.loads(sys.argv[1])
from tracer import read_job, workloads
from tracer.fake_world import rank_classes
from tracer.parallel_plan import ParallelPlan
from tracer.job import load_job, save_job
settings, plan = workloads.configure("llama"), ParallelPlan.parse(text, ranks)
begin = time.perf_counter()
if how == "captured":
    from tracer.capture import Capture, CaptureOptions
    from tracer.capture.script import run_workload
    options = CaptureOptions(steps=1, warmup=2, timed=0, execution_trace="none")
    for one in rank_classes(plan, settings):
        run_workload(settings, Capture(out + "/job", options), plan, (ranks, one.first))
    job = read_job(out + "/job")
else:
    from tracer.shape_only import trace_job
    job = trace_job(settings, world_size=ranks, parallel=plan)
recorded = time.perf_counter()
save_job(job, out + "/job.foretrace")
saved = time.perf_counter()
loaded = load_job(out + "/job.foretrace")
last = loaded.rank(ranks - 1)
print(json.dumps({"classes": [str(one) for one in loaded.classes], "record": recorded - begin, "save": saved - recorded,
                  "load": time.perf_counter() - saved, "rank": last.meta.rank, "ops": len(last.ops),
                  "collectives": len(last.collectives)}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=1024)
    ranks = parser.parse_args().ranks
    print(f"{'how':<12}{'plan':<16}{'classes':>8}{'record s':>10}{'save s':>8}{'load s':>8}{'inspect s':>11}{'kB':>8}"
          f"{'operations':>12}{'collectives':>13}")
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    for how, plan in CASES:
        with tempfile.TemporaryDirectory() as out:
            done = subprocess.run([sys.executable, "-c", ONE, json.dumps([how, plan, ranks, out])], cwd=ROOT,
                                  capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                sys.exit(done.stderr)
            told = json.loads(done.stdout.strip().splitlines()[-1])
            file = Path(out) / "job.foretrace"
            begin = time.perf_counter()
            subprocess.run([sys.executable, "-c", "from foretrace.commands import main; main()", "inspect", str(file)],
                           cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
            inspected = time.perf_counter() - begin
            print(f"{how:<12}{plan:<16}{len(told['classes']):>8}{told['record']:>10.1f}{told['save']:>8.2f}"
                  f"{told['load']:>8.2f}{inspected:>11.1f}{file.stat().st_size / 1e3:>8,.0f}{told['ops']:>12,}"
                  f"{told['collectives']:>13,}", flush=True)


if __name__ == "__main__":
    main()
