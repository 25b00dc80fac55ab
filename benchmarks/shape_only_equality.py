"""Every workload's step traced by shapes alone beside a real one: the operators, with shapes and dtypes, one by one.

The real step runs on the CPU under PyTorch's profiler, whose account is independent of the trace. First the trace for
the CPU (fake = real), then the trace for a GPU (shape-only = real): where they differ, the written list of
substitutions must say so. "unexplained" is what it does not say, and must be 0. In list arguments the profiler writes
no element type, which is left out of the comparison.

    python benchmarks/shape_only_equality.py    # every workload, preset tiny
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "tests" / "tracer")]

from shape_only_support import calls, differences, dispatched, explained, known_names, profiled_step  # noqa: E402

from tracer import workloads  # noqa: E402
from tracer.shape_only import trace_workload  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", action="append", help="only this one (repeatable)")
    parser.add_argument("--device", default="h200-sxm", help="the GPU of the second table")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting (repeatable)")
    given = parser.parse_args()
    left = 0
    with tempfile.TemporaryDirectory() as folder:
        chosen = {name: workloads.parse(name, given.set, preset="tiny")
                  for name in given.workload or workloads.names()}
        real = {name: profiled_step(settings, Path(folder)) for name, settings in chosen.items()}
        for device in ("cpu", given.device):
            print(f"traced for {device}")
            print(f"{'workload':<10} {'real ops':>9} {'traced ops':>11} {'equal':>7} {'differences':>12} "
                  f"{'unexplained':>12}  substitutions met")
            for name, settings in chosen.items():
                traced = trace_workload(settings, device)
                there, here = dispatched(real[name], known_names(traced)), calls(traced)
                found = differences(there, here)
                checkpointing = bool(settings.checkpointing)
                unexplained = [d for d in found if not explained(d, device, checkpointing=checkpointing)]
                left += len(unexplained)
                met = ", ".join(f"{key} {number}" for key, number in traced.meta.substitutions.items()) or "–"
                equal = len(there) - sum(len(d.real) for d in found)
                print(f"{name:<10} {len(there):>9,} {len(here):>11,} {equal:>7,} {len(found):>12} "
                      f"{len(unexplained):>12}  {met}", flush=True)
                for d in unexplained[:3]:
                    print("   real", [n for n, _ in d.real], "traced", [n for n, _ in d.traced])
    sys.exit(1 if left else 0)


if __name__ == "__main__":
    main()
