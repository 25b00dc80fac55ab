"""What `foretrace diff` says of pairs of traces recorded by others on different devices.

    python benchmarks/diff_traces.py [DATA]

DATA (default: the environment's FORETRACE_DATA, else the shared data beside the checkout) is a folder with `traces/`:
ResNet-50 on a V100 and on an A100 (PARAM's and Kineto's samples), OWLv2, Qwen1.5-0.5B and BERT-small on an H100 and
on an MI300X (TraceLens' samples). For each pair: the difference and its kinds, how much has a cause, and how much of
it is tied to aligned operations or to a place between them (the rest is the device's backlog from before the
recording). That the host decides three of these pairs is known without any alignment: `free` are the steps with all
kernels other than collectives at no time at all.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

from graph_predictor.prediction.replay import replay
from step_views.diff.jobs import diff_jobs
from step_views.diff.result import UNEXPLAINED, Difference, DifferenceKind
from tracer.job import Job, read_job

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
MI300 = "h100-vs-mi300"
PAIRS = (
    ("resnet50-V100", "resnet50-ddp-2xA100", "ResNet-50 V100 → A100"),
    (f"{MI300}/h100-google_owlv2-large-patch14-ensemble.json.gz",
     f"{MI300}/mi300-google_owlv2-large-patch14-ensemble.json.gz", "OWLv2 H100 → MI300X"),
    (f"{MI300}/h100-Qwen_Qwen1.5-0.5B-Chat.json.gz", f"{MI300}/mi300-Qwen_Qwen1.5-0.5B-Chat.json.gz",
     "Qwen1.5-0.5B H100 → MI300X"),
    (f"{MI300}/h100-gaunernst_bert-small-uncased.json.gz", f"{MI300}/mi300-gaunernst_bert-small-uncased.json.gz",
     "BERT-small H100 → MI300X"),
)
HOST = (DifferenceKind.WHOLE_HOST, DifferenceKind.HOST, DifferenceKind.GAP, DifferenceKind.LAUNCH)
SHOWN = 5


def tied(found: Difference) -> float:
    """Share of the difference in parts that lie at an operation or between two."""
    loose = sum(abs(part.time_ns) for part in found.parts
                if part.kind in UNEXPLAINED or part.what == "work launched before the recording")
    return 1 - loose / abs(found.total_ns)


def free_ms(job: Job) -> float:
    """The step's time if kernels took none."""
    return replay(job.graphs, scale_kernels=0.0).step_ns / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    traces = parser.parse_args().data / "traces"
    for first, second, name in PAIRS:
        for before, after, label in ((first, second, name), (second, first, f"{name}, the other way round")):
            jobs = read_job(traces / before), read_job(traces / after)
            diff_jobs(*jobs)  # compiles
            began = time.perf_counter()
            found = diff_jobs(*jobs)
            took = time.perf_counter() - began
            assert sum(part.time_ns for part in found.parts) == found.total_ns
            print(f"\n{label}: {found.before_ns / 1e6:.3f} → {found.after_ns / 1e6:.3f} ms, "
                  f"{found.total_ns / 1e6:+.3f} (free: {free_ms(jobs[0]):.1f} → {free_ms(jobs[1]):.1f} ms)")
            print(f"  aligned {found.aligned:.1%}, attributed {found.attributed:.2%}, tied to operations "
                  f"{tied(found):.2%}; host ×{found.host_ratio or 1:.2f}, device ×{found.device_ratio or 1:.2f}; "
                  f"{took:.2f} s")
            host = sum(part.time_ns for part in found.parts if part.kind in HOST)
            print(f"  kinds: {', '.join(f'{kind.value} {ns / 1e6:+.3f}' for kind, ns, _ in found.by_kind() if ns)}")
            print(f"  host altogether {host / 1e6:+.3f}; first causes:")
            for part in found.top(SHOWN):
                print(f"    {part.time_ns / 1e6:+9.3f} ms  {part.kind.value}: {part.what[:80]}")


if __name__ == "__main__":
    main()
