"""A GPU that is not there: its clock, its kernels' times, its worker processes and its health, all simulated.

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


def law_us(call: OpCall) -> float:
    """The time of a call on the simulated GPU, µs."""
    share = 0.35 + 0.1 * (len(call.kind) % 5)
    rate = H200.peak_tflops(call.dtype, matrix=call.family in (Family.GEMM, Family.CONV, Family.ATTENTION)) * 1e6
    compute = call.flops / rate / (share * (1 - math.exp(-call.flops / 1e9)) + 0.02)
    memory = call.bytes_moved / (H200.memory_bandwidth_gbps * 1e3) / (0.85 if call.bytes_moved > 5e7 else 1.6)
    return 3.1 + (compute**3 + memory**3) ** (1 / 3)


@dataclass
class Bench0:
    """What a test wants of the simulated machine."""

    law: Callable[[OpCall], float] = law_us
    kernel: Callable[[OpCall, Item], str] = lambda call, item: (
        item.settings["backend"] if item.name == "attention" else KERNELS.get(call.family, "some_kernel"))
    refuses: Callable[[Item], str] = lambda item: ""
    interrupt_after: int = 0
    slower_after: int = 10**9
    context: dict[str, Any] = field(default_factory=lambda: CONTEXT)
    asked: list[Item] = field(default_factory=list)
    clock_s: float = 100.0
    dropped: int = 0


class SimulatedWorkers:
    """Instead of ``tracer.campaign.processes.Workers``: measures on the simulated GPU, in simulated time."""

    def __init__(self, bench: Bench0) -> None:
        self._bench, self._gpu = bench, SimulatedGpu()
        flushed = SimpleNamespace(zero_=lambda: self._gpu.launch(60.0))
        torch = SimpleNamespace(cuda=SimulatedCuda(self._gpu), version=SimpleNamespace(hip=None), int32=None,
                                empty=lambda count, **options: flushed)
        self._lab: Any = SimpleNamespace(machine=CudaMachine(torch), is_cuda=True)
        self.context = bench.context

    def take(self, *, fresh: bool) -> SimulatedWorkers:
        return self

    def ask(self, task: Task) -> None:
        self._item = task.item

    def prepare_next(self) -> None:
        pass

    close = prepare_next

    def drop(self) -> None:
        self._bench.dropped += 1

    def answer(self, seconds: float) -> Answer:
        bench, item = self._bench, self._item
        bench.asked.append(item)
        if bench.interrupt_after and len(bench.asked) > bench.interrupt_after:
            raise KeyboardInterrupt
        bench.clock_s += 0.08
        if item.kind != "kernel" or item.name == "overheads":
            return Answer("failed", values={"status": "unsupported"}, reason="NotImplementedError: simulated.")
        refused = bench.refuses(item)
        if refused:
            error = NotImplementedError(refused.partition(": ")[2])
            status = "unsupported" if is_unsupported(error) else "failed"
            return Answer("failed", values={"status": status}, reason=refused)
        calls = calls_of_benchmark(item.name, {**item.settings, "kernels": ["triton_poi_fused_0"]})
        time_us = bench.law(calls[0]) * (1.3 if len(bench.asked) > bench.slower_after else 1.0)

        def work() -> None:
            self._gpu.launch(time_us)

        bench.clock_s += 40 * time_us / 1e6
        common = {"kernels": [bench.kernel(calls[0], item)], "kernel_count": 1.0, "kernel_us": time_us,
                  "event_overhead_us": _empty_pair_us(self._lab), "sm_clock_mhz": self._gpu.clock_mhz,
                  "flops": calls[0].flops, "bytes": calls[0].bytes_moved}
        rows = [{"variant": variant, **_quantiles(_repeat(Bench(work), self._lab, 5.0, time_us, flush)), **common}
                for variant, flush in (("warm", False), ("cold", True))]
        return Answer("done", values={"content": "kernels", "median_ns": round(rows[0]["p50_us"] * 1e3)}, rows=rows)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Bench0:
    """A simulated GPU behind the campaign's runner, with a clock of its own."""
    from kernel_models.calibration import source

    bench = Bench0()

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return bench.clock_s

    monkeypatch.setattr(runner, "Workers", lambda *arguments: SimulatedWorkers(bench))
    monkeypatch.setattr(runner, "time", Clock)
    monkeypatch.setattr(source, "time", Clock)
    monkeypatch.setattr(source.Measurements.__init__, "__defaults__", (Clock.monotonic,))
    return bench


def healthy(device: str) -> Health:
    return replace(HEALTHY, device=device)
