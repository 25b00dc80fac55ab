"""What `foretrace breakdown` costs by events: reading, replaying and breaking down traces of many steps.

    taskset -c 0 python benchmarks/breakdown_speed.py [--events 1250000 5000000] [--steps 365]

Traces are generated: each step is a row of products (an operation inside another, a launch, a kernel each, on a stream
that the host runs ahead of by a few kernels) and a blocking call at its end. Processor seconds, of this process; twice
the events should take twice the time, however many steps they lie in.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import TextIO

from graph_predictor import replay
from step_views.reports.breakdown import breakdown
from tracer.job import read_job

OP_US, KERNEL_US = 20, 22
EVENTS = 4
"""Of one product: two operations, a launch and a kernel."""


def write_trace(file: TextIO, events: int, steps: int) -> int:
    """Write a Kineto trace with about so many events; return how many there are."""
    products = max(events // steps // EVENTS, 1)
    length = products * KERNEL_US + 100
    file.write('{"schemaVersion":1,"traceEvents":[\n')
    for step in range(steps):
        at = step * length
        file.write(f'{{"ph":"X","cat":"user_annotation","name":"ProfilerStep#{step}","pid":1,"tid":1,"ts":{at},'
                   f'"dur":{length}}},\n')
        for number in range(products):
            begin, kernel = at + 5 + OP_US * number, at + 20 + KERNEL_US * number
            correlation = step * (products + 1) + number + 1
            file.write(
                f'{{"ph":"X","cat":"cpu_op","name":"aten::linear","pid":1,"tid":1,"ts":{begin},"dur":18}},\n'
                f'{{"ph":"X","cat":"cpu_op","name":"aten::addmm{number % 50}","pid":1,"tid":1,"ts":{begin + 2},'
                '"dur":14},\n'
                f'{{"ph":"X","cat":"cuda_runtime","name":"cudaLaunchKernel","pid":1,"tid":1,"ts":{begin + 5},"dur":5,'
                f'"args":{{"correlation":{correlation}}}}},\n'
                f'{{"ph":"X","cat":"kernel","name":"gemm{number % 50}","pid":0,"tid":7,"ts":{kernel},'
                f'"dur":{KERNEL_US - 1},"args":{{"device":0,"stream":7,"correlation":{correlation}}}}},\n')
        begin = at + 10 + OP_US * products
        file.write(f'{{"ph":"X","cat":"cuda_runtime","name":"cudaDeviceSynchronize","pid":1,"tid":1,"ts":{begin},'
                   f'"dur":{at + length - 20 - begin},"args":{{"correlation":{(step + 1) * (products + 1)}}}}}'
                   f'{"" if step == steps - 1 else ","}\n')
    file.write("]}\n")
    return steps * (products * EVENTS + 2)


def main() -> None:
    """Print a row for each number of events."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, nargs="+", default=[1_250_000, 5_000_000])
    parser.add_argument("--steps", type=int, default=365)
    parser.add_argument("--unprofiled", action="store_true", help="also take a profiler's cost out")
    options = parser.parse_args()
    print(f"{'events':>10} {'steps':>6} {'read s':>8} {'replay s':>9} {'breakdown s':>12} {'of it µs an event':>18}",
          flush=True)
    # What is compiled on first use is not timed.
    for number, events in enumerate([20_000, *options.events]):
        steps = min(options.steps, max(events // 1000, 1))
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            with path.open("w", encoding="utf-8") as file:
                written = write_trace(file, events, steps)
            clock = [time.process_time()]
            job = read_job(str(path))
        clock.append(time.process_time())
        if options.unprofiled:
            job.graphs[0].meta.unprofiled_step_ns = [int(0.95 * job.graphs[0].steps.duration_ns.mean())] * 10
        replayed = replay(job.graphs, profiled=not options.unprofiled)
        clock.append(time.process_time())
        found = breakdown(replayed)
        clock.append(time.process_time())
        assert len(found.steps) == steps
        read, simulated, broken = (after - before for before, after in pairwise(clock))
        if number:
            print(f"{written:>10,} {steps:>6,} {read:>8.1f} {simulated:>9.1f} {broken:>12.1f} "
                  f"{broken / written * 1e6:>18.2f}", flush=True)


if __name__ == "__main__":
    main()
