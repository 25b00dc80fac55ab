"""Peak memory of a step: traced by shapes alone, and measured on a real CPU run of the same program.

The measurement is the allocator's own: the profiler's ``[memory]`` events of the step. An allocation that begins and
ends within one operator is that operator's workspace, which CPU and GPU kernels choose for themselves; it is left out.
Both run without oneDNN, whose recurrent layers keep a workspace of a size only it knows.
What remains under checkpointing are states of the CPU's random generator, 5,056 bytes each, real tensors in a trace
too.

    python benchmarks/peak_memory.py            # every workload (preset tiny, batch 8), with and without checkpointing
    python benchmarks/peak_memory.py --scaled   # the peak at other batches, from one trace, against the trace there

The second scales the moments of one trace (`graph_predictor/prediction/result.py`), as where a step cannot be traced
again; beside it what the peak alone would say, with its activations scaled. Both are shape-only: no run is needed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests" / "tracer")]

import numpy as np  # noqa: E402
from shape_only_support import real_peak_bytes, traced_peak_bytes  # noqa: E402

from graph_predictor.prediction.result import peak_memory, with_sizes  # noqa: E402
from graph_predictor.synthesis.baseline import baseline_of  # noqa: E402
from tracer import workloads  # noqa: E402
from tracer.shape_only import trace_workload  # noqa: E402

SIZES: dict[str, dict[str, Any]] = {
    "dlrm": {"batch": 512}, "resnet50": {"batch": 4, "resolution": 64}, "bert": {"batch": 8, "seq": 64, "depth": 3},
    "gpt2": {"batch": 8, "seq": 64, "depth": 3}, "llama": {"batch": 8, "seq": 64, "depth": 3},
    "vit": {"batch": 16, "resolution": 64, "depth": 3}, "moe": {"batch": 8, "seq": 64, "depth": 3},
    "unet": {"batch": 2, "resolution": 64}, "lstm": {"batch": 16, "seq": 32, "depth": 2},
}


FACTORS = (0.25, 4.0, 16.0)
"""Of the batch in the second table."""


def scaled(names: list[str]) -> None:
    """Print the peak at other batches from one trace, by its moments and by its peak alone, and traced there."""
    print(f"{'workload':<10} {'batch':>12} {'traced, B':>14} {'by moments':>14} {'error':>8} {'by the peak':>14} "
          f"{'error':>8}")
    errors: list[tuple[float, float]] = []
    for name in names:
        sizes = {**SIZES[name], "batch": 4 * SIZES[name]["batch"]}
        graph = trace_workload(workloads.configure(name, preset="tiny", **sizes), "h200-sxm")
        scenario, memory = baseline_of(graph).scenario, graph.meta.memory
        for factor in FACTORS:
            batch = round(sizes["batch"] * factor)
            settings = workloads.configure(name, preset="tiny", **{**sizes, "batch": batch})
            truth = trace_workload(settings, "h200-sxm").meta.memory["peak"]
            moments = peak_memory(with_sizes(scenario, factor)) or 0
            alone = round(memory["peak"] + (factor - 1) * memory["activations"])
            errors.append((abs(moments / truth - 1), abs(alone / truth - 1)))
            change = f"{sizes['batch']} → {batch}"
            print(f"{name:<10} {change:>12} {truth:>14,} {moments:>14,} {moments / truth - 1:>+8.2%} {alone:>14,} "
                  f"{alone / truth - 1:>+8.2%}", flush=True)
    mean, most = np.mean(errors, axis=0), np.max(errors, axis=0)
    print(f"mean |error| {mean[0]:.2%}, largest {most[0]:.2%}; by the peak alone {mean[1]:.2%}, {most[1]:.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="only this one (repeatable)")
    parser.add_argument("--scaled", action="store_true", help="other batches from one trace, against traces there")
    options = parser.parse_args()
    chosen = options.workload or workloads.names()
    if options.scaled:
        scaled(chosen)
        return
    print(f"{'workload':<10} {'checkpointing':<14} {'real CPU, B':>14} {'shape-only, B':>14} {'error':>8} "
          f"{'as h200-sxm, B':>15}")
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for name in chosen:
            for checkpointing in (False, True):
                settings = workloads.configure(name, preset="tiny", checkpointing=checkpointing, **SIZES[name])
                real = real_peak_bytes(settings, Path(folder))
                traced = traced_peak_bytes(settings)
                gpu = trace_workload(settings, "h200-sxm").meta.memory["peak"]
                worst = max(worst, abs(traced / real - 1))
                print(f"{name:<10} {'yes' if checkpointing else 'no':<14} {real:>14,} {traced:>14,} "
                      f"{traced / real - 1:>+8.2%} {gpu:>15,}", flush=True)
    print(f"largest |error| {worst:.2%}")


if __name__ == "__main__":
    main()
