"""A GPU, or a host, that is not there: its clock, its kernels' times, its workers and its health, all simulated.

The times are a law that no formula of ours has: efficiencies by kind and size, and a floor. The measuring code
(`tracer.campaign.micro`) runs against the simulated clock as it runs against a GPU's events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
from simulated_gpu.driver import SimulatedCuda, SimulatedGpu

from kernel_models.calibration.checks import Health
from kernel_models.datasets.campaign import calls_of_benchmark
from kernel_models.device import device
from kernel_models.op_call import Family, OpCall
from tracer.campaign import runner
from tracer.campaign.families import Bench
from tracer.campaign.items import Item
from tracer.campaign.lab import CudaMachine
from tracer.campaign.micro import _empty_pair_us, _quantiles, _repeat
from tracer.campaign.record import Answer, Task, is_unsupported
from tracer.campaign.tables import warm_variant

H200 = device("h200-sxm")
HEALTHY = Health("cuda", "NVIDIA H200", 1980.0, 1980.0, (), 141e9, 140e9, 0, 0.0)
CONTEXT = {
    "hardware": {"device": "NVIDIA H200", "total_memory": 150_754_820_096, "multi_processor_count": 132},
    "software": {"torch": "2.9.0"},
}
KERNELS = {
    Family.GEMM: "nvjet_tst_128x256", Family.CONV: "sm90_xmma_fprop_implicit_gemm", Family.NORM: "layer_norm_kernel",
    Family.SOFTMAX: "softmax_warp_forward", Family.MEMSET: "Memset (Device)", Family.TRANSFER: "Memcpy HtoD",
}


CPU_CONTEXT = {"hardware": {"device": "CPU", "cpu": "Some CPU", "cores": 2}, "software": {"torch": "2.9.0"}}


def host_law_us(call: OpCall) -> float:
    """The time of a call on the simulated host when nothing else runs there, µs."""
    spec = device("cpu")
    return 1.5 + call.flops / (0.6e6 * spec.peak_tflops(call.dtype)) + call.bytes_moved / (
        0.7e3 * spec.memory_bandwidth_gbps)


def no_capture(task: Task) -> list[Answer]:
    """Refuse a step's capture, as the simulated GPU does by itself."""
    return [Answer("failed", values={"status": "unsupported"}, reason="NotImplementedError: simulated.")]


def law_us(call: OpCall) -> float:
    """The time of a call on the simulated GPU, µs."""
    share = 0.35 + 0.1 * (len(call.kind) % 5)
    rate = H200.peak_tflops(call.dtype, matrix=call.family in (Family.GEMM, Family.CONV, Family.ATTENTION)) * 1e6
    compute = call.flops / rate / (share * (1 - math.exp(-call.flops / 1e9)) + 0.02)
    memory = call.bytes_moved / (H200.memory_bandwidth_gbps * 1e3) / (0.85 if call.bytes_moved > 5e7 else 1.6)
    return 3.1 + (compute**3 + memory**3) ** (1 / 3)


@dataclass
class Bench0:
    """What a test wants of the simulated machine.

    ``seconds`` is what each measurement takes beside its runs (fewer let more be made), ``first_s`` what the first
    takes more, ``disturbed`` how many times as long work takes at a moment (s), ``capture`` answers to the task of
    capturing a step.
    """

    law: Callable[[OpCall], float] = law_us
    kernel: Callable[[OpCall, Item], str] = lambda call, item: (
        item.settings["backend"] if item.name == "attention" else KERNELS.get(call.family, "some_kernel"))
    refuses: Callable[[Item], str] = lambda item: ""
    disturbed: Callable[[float], float] = lambda at_s: 1.0
    capture: Callable[[Task], list[Answer]] = no_capture
    seconds: float = 0.2
    first_s: float = 0.0
    interrupt_after: int = 0
    slower_after: int = 10**9
    context: dict[str, Any] = field(default_factory=lambda: CONTEXT)
    asked: list[Item] = field(default_factory=list)
    clock_s: float = 100.0
    dropped: int = 0


class SimulatedWorkers:
    """Instead of ``tracer.campaign.processes.Workers``: measures on the simulated GPU, in simulated time."""

    def __init__(self, bench: Bench0, device: str) -> None:
        self._bench, self._gpu, self._device = bench, SimulatedGpu(), device
        self._answers: list[Answer] = []
        self.tasks_done = 0
        flushed = SimpleNamespace(zero_=lambda: self._gpu.launch(60.0))
        torch = SimpleNamespace(cuda=SimulatedCuda(self._gpu), version=SimpleNamespace(hip=None), int32=None,
                                empty=lambda count, **options: flushed)
        self._lab: Any = SimpleNamespace(machine=CudaMachine(torch), is_cuda=True)
        self.context = bench.context

    def take(self, *, fresh: bool) -> SimulatedWorkers:
        return self

    def ask(self, task: Task) -> None:
        self._item = task.item
        self.tasks_done += 1
        self._answers = self._bench.capture(task) if task.item.kind == "workload" else []

    def prepare_next(self) -> None:
        pass

    close = prepare_next

    def drop(self) -> None:
        self._bench.dropped += 1

    def answer(self, seconds: float) -> Answer:
        bench, item = self._bench, self._item
        if item.kind == "workload":
            return self._answers.pop(0)
        bench.asked.append(item)
        if bench.interrupt_after and len(bench.asked) > bench.interrupt_after:
            raise KeyboardInterrupt
        bench.clock_s += bench.seconds + bench.first_s * (self.tasks_done == 1)
        if item.name == "overheads":
            return Answer("failed", values={"status": "unsupported"}, reason="NotImplementedError: simulated.")
        refused = bench.refuses(item)
        if refused:
            error = NotImplementedError(refused.partition(": ")[2])
            status = "unsupported" if is_unsupported(error) else "failed"
            return Answer("failed", values={"status": status}, reason=refused)
        calls = calls_of_benchmark(item.name, {**item.settings, "kernels": ["triton_poi_fused_0"]})
        if self._device == "cpu":
            return self._on_host(calls[0])
        time_us = bench.law(calls[0]) * (1.3 if len(bench.asked) > bench.slower_after else 1.0)

        def work() -> None:
            self._gpu.launch(time_us * bench.disturbed(bench.clock_s))

        bench.clock_s += 40 * time_us / 1e6
        common = {"kernels": [bench.kernel(calls[0], item)], "kernel_count": 1.0, "kernel_us": time_us,
                  "event_overhead_us": _empty_pair_us(self._lab), "sm_clock_mhz": self._gpu.clock_mhz,
                  "flops": calls[0].flops, "bytes": calls[0].bytes_moved}
        rows = [{"variant": variant, **_quantiles(_repeat(Bench(work), self._lab, 5.0, time_us, flush)), **common}
                for variant, flush in (("warm", False), ("cold", True))]
        return Answer("done", values={"content": "kernels", "median_ns": round(rows[0]["p50_us"] * 1e3)}, rows=rows)

    def _on_host(self, call: OpCall) -> Answer:
        bench, visit = self._bench, self._item.visit
        time_us = host_law_us(call) * bench.disturbed(bench.clock_s)
        rows = [{"variant": variant, **_quantiles([time_us] * 10), "event_overhead_us": 0.0, "flops": call.flops,
                 "bytes": call.bytes_moved} for variant in (warm_variant(visit), *["cold"] * (visit == 1))]
        return Answer("done", values={"content": "kernels", "median_ns": round(time_us * 1e3)}, rows=rows)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Bench0:
    """A simulated GPU behind the campaign's runner, with a clock of its own."""
    from kernel_models import fitting
    from kernel_models.calibration import run, source
    from kernel_models.learned import gaussian, process

    bench = Bench0()

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return bench.clock_s

    monkeypatch.setattr(runner, "Workers", lambda device, *others: SimulatedWorkers(bench, device))
    for module in (runner, source, run, fitting, gaussian, process):  # fits take no time, however busy this machine is
        monkeypatch.setattr(module, "time", Clock)
    monkeypatch.setattr(source.Measurements.__init__, "__defaults__", (Clock.monotonic,))
    return bench


def healthy(device: str) -> Health:
    return replace(HEALTHY, device=device)
