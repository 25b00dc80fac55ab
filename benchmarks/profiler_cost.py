"""What PyTorch's profiler costs by event; and steps of recordings with it taken out, beside what they took without it.

    python benchmarks/profiler_cost.py RECORDINGS...                    (such as traces/host traces/host-held-out)
    OMP_NUM_THREADS=1 python benchmarks/profiler_cost.py --loops [--rounds 9]

``RECORDINGS`` are folders of programs with a folder of each round (``traces/record_host.py``). What each capture knows
of its step without the profiler is the truth, and hidden: the cost is what the recording's own operations that only
call others say (``kernel_models/host/overheads.py``, whose spread is from ``traces/host``; of
``traces/host-held-out`` nothing was chosen). Of a program the median of its rounds counts.

With ``--loops``, loops of small operations are timed without the profiler and under it, in turns, with one thing more
recorded at a time. Each loop makes a known number of events; the difference over that number is an event's cost.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np

from graph_predictor.edits.without_profiler import TakeOutProfiler
from graph_predictor.prediction.unprofiled import events_of
from graph_predictor.synthesis.baseline import baseline_of
from kernel_models.host.segments import event_cost
from tracer.job import read_job

CALLS = 400
RECORDED: dict[str, dict[str, bool]] = {
    "operations": {}, "and shapes": {"record_shapes": True},
    "and memory": {"record_shapes": True, "profile_memory": True},
    "and stacks": {"record_shapes": True, "with_stack": True},
    "and modules": {"record_shapes": True, "with_modules": True}}


def _recordings(folder: Path) -> None:
    """Print each program: what it took, and what its profiled steps say of that."""
    print(f"\n{folder!s:34} under it  without   told   error within   event: true   told, ns")
    errors, raw, held, ratios = [], [], [], []
    for program in sorted(path for path in folder.iterdir() if path.is_dir()):
        rows = np.array([_recording(path) for path in sorted(program.glob("round*"))])
        profiled, truth, said, _, _, true_ns, told_ns = np.median(rows, axis=0).tolist()
        errors.append(said / truth - 1)
        raw.append(profiled / truth - 1)
        held.append(float(np.mean((rows[:, 3] <= rows[:, 1]) & (rows[:, 1] <= rows[:, 4]))))
        ratios.append(true_ns / told_ns)
        print(f"{program.name:34}{profiled:9.2f}{truth:9.2f}{said:7.2f}{errors[-1]:+8.1%}{held[-1]:7.0%}{true_ns:14.0f}"
              f"{told_ns:11.0f}")
    for name, found in (("as recorded", raw), ("--without-profiler", errors)):
        size = np.abs(found)
        print(f"{name}: MAPE {size.mean():.1%}, median {np.median(size):.1%}, bias {np.mean(found):+.1%}, p90 "
              f"{np.quantile(size, 0.9):.1%}, worst {size.max():.1%}")
    print(f"in the 80% interval: {np.mean(held):.0%} of rounds; an event's true cost over the told one: median "
          f"{np.median(ratios):.2f}, {min(ratios):.2f} to {max(ratios):.2f}, log's standard deviation "
          f"{np.std(np.log(ratios), ddof=1):.2f}")


def _recording(path: Path) -> tuple[float, ...]:
    """Step under the profiler, without it, as told with its interval (ms); true and told cost of an event (ns)."""
    job = read_job(path)
    graph = job.graphs[0]
    truth = float(np.median(graph.meta.unprofiled_step_ns))
    graph.meta.unprofiled_step_ns = []
    baseline = baseline_of(job)
    said = baseline.predict([TakeOutProfiler()])
    scenario = baseline.scenario
    events = float(events_of(scenario)[scenario.cycle.working[scenario.slices.item]].sum()) / scenario.cycle.steps
    profiled = baseline.predict().step_time_us * 1e3
    return (profiled / 1e6, truth / 1e6, said.step_time_us / 1e3, said.interval_us[0] / 1e3, said.interval_us[1] / 1e3,
            (profiled - truth) / events, event_cost(graph).ns)


def _loops() -> Iterator[tuple[str, Callable[[], None], int]]:
    """Name of a kind of event, a loop of it, and how many events one turn of the loop makes."""
    import torch
    from torch.profiler import ProfilerActivity, profile, record_function

    small, other = torch.ones(4), torch.ones(4)
    matrix, weight, bias = torch.ones(4, 4), torch.ones(4, 4), torch.ones(4)
    leaf = torch.ones(4, requires_grad=True)

    def single() -> None:
        for _ in range(CALLS):
            torch.add(small, other, out=small)

    def views() -> None:
        for _ in range(CALLS):
            matrix.t()  # aten::t and aten::transpose, aten::as_strided inside

    def nested() -> None:
        for _ in range(CALLS):
            torch.nn.functional.linear(matrix, weight, bias)  # linear, t, transpose, as_strided, addmm, expand, …

    def noted() -> None:
        for _ in range(CALLS):
            with record_function("range"):
                pass

    def backward() -> None:
        for _ in range(CALLS // 8):
            total = leaf
            for _ in range(8):
                total = total * 2.0
            total.sum().backward()

    for name, loop in (("one operation", single), ("nested views", views), ("linear", nested), ("ranges", noted),
                       ("forward and backward", backward)):
        with profile(activities=[ProfilerActivity.CPU]) as found:
            loop()
        yield name, loop, len(found.events())


def _timed(loop: Callable[[], None], recorded: dict[str, bool] | None) -> float:
    """Seconds that a loop takes; under the profiler with what is to be recorded."""
    from torch.profiler import ProfilerActivity, profile

    context = nullcontext() if recorded is None else profile(activities=[ProfilerActivity.CPU], **recorded)
    with context:
        loop()
        begin = time.perf_counter()
        loop()
        return time.perf_counter() - begin


def _time_loops(rounds: int) -> None:
    """Print what an event of each loop costs with each thing recorded."""
    import torch

    torch.set_num_threads(1)
    print(f"{'loop':24}{'events':>8}{'bare ns':>9}" + "".join(f"{name:>24}" for name in RECORDED))
    for name, loop, events in _loops():
        gc.collect()
        cost: dict[str, list[float]] = {each: [] for each in RECORDED}
        bare = []
        for _ in range(rounds):
            alone = _timed(loop, None)
            bare.append(alone / events * 1e9)
            for each, recorded in RECORDED.items():
                cost[each].append((_timed(loop, recorded) - alone) / events * 1e9)
        print(f"{name:24}{events:8}{statistics.median(bare):9.0f}" + "".join(
            f"{statistics.median(found):10.0f} ({min(found):5.0f}–{max(found):5.0f})" for found in cost.values()))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recordings", type=Path, nargs="*")
    parser.add_argument("--loops", action="store_true")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for folder in options.recordings:
        _recordings(folder)
    if options.loops:
        _time_loops(options.rounds)


if __name__ == "__main__":
    main()
