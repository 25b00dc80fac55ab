"""A Llama-3-8B training step traced by shapes alone: time, memory of the process, and what comes out.

Each case runs in a process of its own, so that times include importing PyTorch and memory is that of one trace.

    python benchmarks/shape_only.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LLAMA_3_8B = {
    "batch": 1, "seq": 8192, "width": 4096, "depth": 32, "heads": 32, "kv_heads": 8, "hidden": 14336,
    "vocabulary": 128256, "dtype": "bf16", "optimizer": "adamw-fused"}
CASES: dict[str, tuple[int | None, str | None, bool]] = {
    "one GPU": (None, None, False), "one GPU, checkpointing": (None, None, True), "FSDP2 × 64": (64, "fsdp2", False),
    "TP 8": (8, "tp", False), "FSDP2 8 × TP 8": (64, "fsdp2=8,tp=8", False)}

ONE = """
import json, resource, sys, time
begin = time.perf_counter()
from tracer import workloads
from tracer.shape_only import trace_workload
values, world, plan = json.loads(sys.argv[1])
graph = trace_workload(workloads.configure("llama", **values), world_size=world, parallel=plan)
kinds = [graph.string(int(code)) for code in graph.collectives.kind]
print(json.dumps({"s": time.perf_counter() - begin, "cpu_s": time.process_time(),
                  "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "ops": len(graph.ops),
                  "collectives": {kind: kinds.count(kind) for kind in sorted(set(kinds))},
                  "peak": graph.meta.memory["peak"]}))
"""


def main() -> None:
    print(f"{'case':<24} {'wall s':>7} {'CPU s':>6} {'process MB':>11} {'operations':>11} {'step peak GiB':>14}  "
          "collectives")
    for name, (world, plan, checkpointing) in CASES.items():
        asked = json.dumps([{**LLAMA_3_8B, "checkpointing": checkpointing}, world, plan])
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", ONE, asked], cwd=ROOT, capture_output=True,
                              text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        told = json.loads(done.stdout.strip().splitlines()[-1])
        collectives = ", ".join(f"{number} {kind}" for kind, number in told["collectives"].items()) or "–"
        print(f"{name:<24} {time.perf_counter() - begin:>7.1f} {told['cpu_s']:>6.1f} {told['rss'] / 1e6:>11,.0f} "
              f"{told['ops']:>11,} {told['peak'] / 2**30:>14.2f}  {collectives}", flush=True)


if __name__ == "__main__":
    main()
