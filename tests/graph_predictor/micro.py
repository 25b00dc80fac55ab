"""A tiny builder of profiler traces by hand: write what happened, in microseconds, and read it with the real reader.

    trace = Micro().step(0, 100)
    trace.launch(10, 5, kernel=(7, 20, 30))  # call at 10 for 5 us; kernel on stream 7 at 20 for 30 us
    graph = trace.read(tmp_path)

Nothing here computes a time: each trace holds the literal times of its paper drawing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from graph_predictor.prediction.replay import Replay, ReplayedStep, replay
from graph_predictor.simulation.program import ItemKind
from tracer.graph import ExecutionGraph
from tracer.job import read_job
from tracer.kineto import read_kineto

Kernel = tuple[int, float, float]
"""(stream, start, duration)"""

LATENCY = 5
"""From a call's end to its kernel's start on an idle stream, in every micro trace that calls ``calibrate``."""
GAP = 1
"""Between two queued kernels of one stream, likewise."""

_CATEGORIES = {
    "kineto": {"op": "cpu_op", "call": "cuda_runtime", "kernel": "kernel", "memcpy": "gpu_memcpy",
               "memset": "gpu_memset", "note": "user_annotation"},
    "kineto-2021": {"op": "Operator", "call": "Runtime", "kernel": "Kernel", "memcpy": "Memcpy", "memset": "Memset",
                    "note": "Operator"},
}
_CATEGORIES["list-2020"] = _CATEGORIES["kineto-2021"]


class Micro:
    """One rank's trace. ``era`` is "kineto", "kineto-2021" or "list-2020"; ``base`` shifts all times (us)."""

    def __init__(self, *, era: str = "kineto", rank: int | None = None, world_size: int = 1, base: float = 0.0) -> None:
        self.era = era
        self.base = base
        self.events: list[dict[str, Any]] = []
        self.metadata: dict[str, Any] = {"schemaVersion": 1}
        if rank is not None:
            self.metadata["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
        self.correlation = 0

    # host

    def step(self, start: float, end: float, number: int = 1, thread: int = 1) -> Micro:
        """A `ProfilerStep#number` annotation."""
        return self._event("note", f"ProfilerStep#{number}", start, end - start, 1, thread)

    def op(self, name: str, start: float, end: float, thread: int = 1, **args: Any) -> Micro:
        """A framework operation."""
        return self._event("op", name, start, end - start, 1, thread, **args)

    def call(self, name: str, start: float, duration: float, thread: int = 1, correlation: int | None = None) -> int:
        """A runtime call of any name; returns its correlation."""
        if correlation is None:
            self.correlation += 1
            correlation = self.correlation
        self._event("call", name, start, duration, 1, thread, correlation=correlation)
        return correlation

    def launch(self, start: float, duration: float, kernel: Kernel | None = None, *, kernels: Sequence[Kernel] = (),
               thread: int = 1, call: str = "cudaLaunchKernel", name: str = "gemm", kind: str = "kernel",
               device: int = 0, **args: Any) -> int:
        """A launch call and the device work of its correlation (none at all: work that left no record)."""
        correlation = self.call(call, start, duration, thread)
        for stream, begin, length in [*([kernel] if kernel else []), *kernels]:
            self.device_work(stream, begin, length, correlation, name, kind, device, **args)
        return correlation

    def copy(self, start: float, duration: float, kernel: Kernel, direction: str, nbytes: int, *,
             call: str = "cudaMemcpyAsync", thread: int = 1) -> int:
        """A copy; ``direction`` as in "DtoH (Device -> Pageable)"."""
        return self.launch(start, duration, kernel, call=call, thread=thread, name=f"Memcpy {direction}",
                           kind="memcpy", bytes=nbytes)

    def cuda_sync(self, kind: str, start: float, duration: float, correlation: int, *, stream: int = -1,
                  wait_on: int = -1, record: int = -1) -> Micro:
        """The `cuda_sync` event that newer CUPTI versions write beside a synchronising call."""
        args = {"cuda_sync_kind": kind, "stream": stream, "correlation": correlation, "wait_on_stream": wait_on,
                "wait_on_cuda_event_record_corr_id": record, "device": 0, "context": 1}
        self.events.append(self._row("cuda_sync", kind, start, duration, 0, stream, args))
        return self

    # device

    def device_work(self, stream: int, start: float, duration: float, correlation: int, name: str = "gemm",
                    kind: str = "kernel", device: int = 0, **args: Any) -> Micro:
        """A kernel, copy or memset; with a correlation no call has, an orphan."""
        return self._event(kind, name, start, duration, device, stream, device=device, stream=stream,
                           correlation=correlation, **args)

    def orphan(self, stream: int, start: float, duration: float) -> Micro:
        """A kernel launched before the window."""
        self.correlation += 1
        return self.device_work(stream, start, duration, 1_000_000 + self.correlation)

    def calibrate(self, at: float = 0, stream: int = 7) -> Micro:
        """Step 0, from ``at`` for 600 us: what pins the constants, ``LATENCY`` and ``GAP``. Idle from 523 on.

            calls   |10|  |110|  |210|  |310|320|330|340|
            kernels    20    120    220   320---370 371---421 422---472 473---523
        """
        self.step(at, at + 600, 0)
        for begin in (at + 10, at + 110, at + 210):
            self.launch(begin, 5, (stream, begin + 10, 20))
        for number in range(4):
            self.launch(at + 310 + 10 * number, 5, (stream, at + 320 + 51 * number, 50))
        return self

    # out

    def document(self) -> Any:
        """The JSON value: a list in 2020, an object since."""
        if self.era == "list-2020":
            return self.events
        return {**self.metadata, "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        """Write the trace to ``path``."""
        path.write_text(json.dumps(self.document()), encoding="utf-8")
        return path

    def read(self, folder: Path) -> ExecutionGraph:
        """The graph, through a file in ``folder``."""
        return read_kineto(self.write(folder / "micro.json"))

    def _event(self, kind: str, name: str, start: float, duration: float, pid: int, tid: int, **args: Any) -> Micro:
        self.events.append(self._row(_CATEGORIES[self.era][kind], name, start, duration, pid, tid, args))
        return self

    def _row(self, category: str, name: str, start: float, duration: float, pid: int, tid: int,
             args: dict[str, Any]) -> dict[str, Any]:
        # Traces up to 2023 have integer microseconds only; a half would be a slip of the drawing.
        begin, length = round(start + self.base, 3), round(duration, 3)
        if begin == int(begin) and length == int(length):
            begin, length = int(begin), int(length)
        elif self.era != "kineto":
            raise ValueError(f"{self.era} traces hold whole microseconds, not {begin} for {length}")
        return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": begin, "dur": length,
                "args": args}


def read_ranks(traces: Iterable[Micro], folder: Path) -> list[ExecutionGraph]:
    """Several ranks' graphs through files and the job reader."""
    paths = [trace.write(folder / f"rank{rank}.json") for rank, trace in enumerate(traces)]
    return read_job(paths).graphs


def host_span_ns(result: Replay, step: ReplayedStep) -> int:
    """Replayed time from the begin to the end of a step on its thread, ns."""
    end = result.simulated.item_end
    return int(end[step.end_item] - end[step.begin_item])


def step_us(result: Replay, name: str, rank: int = 0) -> float:
    """Replayed time of one step on its thread (us), whether or not its device falls behind."""
    ranks = [step.rank for step in result.steps]
    wanted = sorted(set(ranks))[rank]
    found = [s for s in result.steps if s.rank == wanted and s.name == f"ProfilerStep#{name}"]
    assert len(found) == 1, [s.name for s in result.steps]
    return host_span_ns(result, found[0]) / 1000


def closes(graphs: ExecutionGraph | list[ExecutionGraph], tolerance_us: float = 0.001) -> Replay:
    """Replay in constants mode; assert that every step and every kernel's end is as recorded, within the tolerance.

    Beside it the playback with residuals, which must be exact for every kernel and every call.
    """
    result = replay(graphs)
    played = replay(graphs, residuals=True, built=result.built)
    assert not played.kernel_end_errors_ns().any()
    # Of several threads a caller waited for, only the last one's resume has a recorded time of its own.
    timed = played.program.item_kind != ItemKind.RESUME
    assert (played.simulated.item_end == played.program.recorded_item_end)[timed].all()
    for step in result.steps:
        assert abs(step.replayed_ns - step.measured_ns) <= 1000 * tolerance_us, (step, step.error)
    late = abs(result.kernel_end_errors_ns())
    assert not len(late) or late.max() <= 1000 * tolerance_us, late
    assert result.unexplained_share == 0
    return result
