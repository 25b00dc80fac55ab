"""How many events a second the simulator replays, and what building a program costs.

    python benchmarks/simulator_speed.py [DATA] [--tiles 10] [--repeats 5]

An event is a host item (call or marker) or a piece of device work. DATA (default: the environment's FORETRACE_DATA,
else the shared data beside the checkout) is a folder with `traces/`. Programs are also tiled: the same job again and
again, each copy after the one before, its threads going on where they were; this makes launch queues, streams and
threads longer. The first simulation compiles or loads the compiled code and is shown apart; then the best time counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import numpy as np

from graph_predictor.simulation.build import Built, build_program
from graph_predictor.simulation.engine import simulate
from graph_predictor.simulation.program import NEVER, Program
from tracer.arrays import Int64
from tracer.job import read_job

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("FORETRACE_DATA", ROOT.parent / "shared" / "data"))
TARGET = 1_000_000
"""Events a second, after warm-up."""
CASES = (("rank 3 of 8xA100", "rank3-of-8xA100-6steps/rank3.kineto.json.gz"),
         ("DLRM, 8 ranks jointly", "dlrm-8xV100-2023"),
         ("ResNet-50 V100, full queue", "resnet50-V100/rank0.kineto.json.gz"))


def tile(program: Program, copies: int) -> Program:
    """The job ``copies`` times in a row, as one program: every thread, stream and launch queue goes on."""
    if copies == 1:
        return program
    p = program
    kernels, threads = len(p.kernel_item), len(p.thread_rank)
    window = int(max(p.recorded_item_end.max(initial=0), p.recorded_kernel_end.max(initial=0)))
    window += 1_000_000
    item_at = _places(p.thread_ptr, copies)
    kernel_at = _places(p.kernel_ptr, copies)
    columns: dict[str, np.ndarray] = {"thread_rank": p.thread_rank, "thread_start": p.thread_start}

    def rows(name: str, place: Int64, change: Callable[[np.ndarray, int], np.ndarray] | None = None) -> None:
        value = getattr(p, name)
        out = np.empty(len(value) * copies, value.dtype)
        for copy in range(copies):
            out[place[copy]] = change(value, copy) if change else value
        columns[name] = out

    def later(value: np.ndarray, copy: int) -> np.ndarray:
        return np.where(value > NEVER, value + copy * window, NEVER)

    def pointing(place: Int64) -> Callable[[np.ndarray, int], np.ndarray]:
        return lambda value, copy: np.where(value >= 0, place[copy][value], -1)

    entries = np.diff(p.queue_ptr)
    per_item = entries[p.item_channel] if len(entries) else np.zeros(len(p.item_kind), np.int64)
    for name in ("item_kind", "item_row", "item_work", "item_cost", "item_return", "item_channel"):
        rows(name, item_at)
    rows("item_queue", item_at, lambda value, copy: np.where(value >= 0, value + copy * per_item, -1))
    for name in ("item_external", "recorded_item_start", "recorded_item_end"):
        rows(name, item_at, later)
    for name in ("kernel_reference", "kernel_latency", "kernel_gap", "kernel_duration"):
        rows(name, kernel_at)
    for name in ("kernel_external", "recorded_kernel_start", "recorded_kernel_end"):
        rows(name, kernel_at, later)
    rows("kernel_item", kernel_at, pointing(item_at))
    rows("kernel_previous", kernel_at, pointing(kernel_at))
    groups = len(p.group_size)
    rows("kernel_group", kernel_at, lambda value, copy: np.where(value >= 0, value + copy * groups, -1))
    _continue_streams(p, kernel_at, columns["kernel_previous"])
    for prefix, owners, targets, target in (("after", item_at, item_at, "after_item"),
                                            ("wait", item_at, kernel_at, "wait_kernel"),
                                            ("edge", kernel_at, kernel_at, "edge_kernel")):
        ptr = getattr(p, f"{prefix}_ptr")
        owner = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
        all_owners = np.concatenate([place[owner] for place in owners])
        order = np.argsort(all_owners, kind="stable")
        counts = np.bincount(all_owners, minlength=(len(ptr) - 1) * copies)
        columns[f"{prefix}_ptr"] = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        for f in fields(p):
            if f.name.startswith(f"{prefix}_") and f.name != f"{prefix}_ptr":
                value = getattr(p, f.name)
                parts = [place[value] if f.name == target else value for place in targets]
                columns[f.name] = np.concatenate(parts)[order]
    columns["group_size"] = np.tile(p.group_size, copies)
    columns["thread_ptr"], columns["kernel_ptr"] = p.thread_ptr * copies, p.kernel_ptr * copies
    columns["queue_ptr"], columns["queue_depth"] = p.queue_ptr * copies, p.queue_depth
    queue_at = _places(p.queue_ptr, copies)
    rows("queue_kernel", queue_at, pointing(kernel_at))
    assert threads == len(columns["thread_rank"]) and kernels * copies == len(columns["kernel_item"])
    return Program(**columns)


def _places(ptr: Int64, copies: int) -> Int64:
    """Row of every (copy, old row) when each block of ``ptr`` is repeated in place."""
    old = np.arange(int(ptr[-1]))
    block = np.repeat(np.arange(len(ptr) - 1), np.diff(ptr))
    size = np.diff(ptr)[block]
    return np.stack([ptr[block] * copies + copy * size + (old - ptr[block]) for copy in range(copies)])


def _continue_streams(p: Program, kernel_at: Int64, previous: np.ndarray) -> None:
    """The first kernel of every stream follows that stream's last one of the copy before."""
    following = np.full(len(p.kernel_item), -1)
    has = p.kernel_previous >= 0
    following[p.kernel_previous[has]] = np.nonzero(has)[0]
    for first in np.nonzero(~has)[0].tolist():
        last = first
        while following[last] >= 0:
            last = int(following[last])
        for copy in range(1, len(kernel_at)):
            previous[kernel_at[copy][first]] = kernel_at[copy - 1][last]


def best(action: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest run."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", type=Path, default=DATA)
    parser.add_argument("--tiles", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    traces = options.data / "traces"
    if not traces.is_dir():
        print(f"{traces} does not exist; name the folder that holds traces/, or set FORETRACE_DATA.", file=sys.stderr)
        return 2
    slowest = float("inf")
    print(f"{'program':34}{'events':>11}{'build s':>9}{'us/event':>10}{'first s':>9}{'simulate s':>12}{'events/s':>13}")
    for label, name in CASES:
        graphs = read_job(traces / name).graphs
        built: list[Built] = []
        start = time.perf_counter()
        built.append(build_program(graphs))
        building = time.perf_counter() - start
        for copies in (1, options.tiles):
            program = tile(built[0].program, copies)
            events = len(program.item_kind) + len(program.kernel_item)
            first = best(lambda program=program: simulate(program), 1)
            seconds = best(lambda program=program: simulate(program), options.repeats)
            slowest = min(slowest, events / seconds)
            costs = f"{building:9.3f}{building / events * 1e6:10.2f}" if copies == 1 else " " * 19
            print(f"{label + (f' x {copies}' if copies > 1 else ''):34}{events:11,}{costs}{first:9.3f}{seconds:12.4f}"
                  f"{events / seconds:13,.0f}")
    print(f"\nSlowest: {slowest:,.0f} events/s; target {TARGET:,}: {'met' if slowest >= TARGET else 'missed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
