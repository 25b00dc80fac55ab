"""Facts about the machine and the process that a prediction needs in addition to a trace. No host, user or path names.

Clocks and power of the device are sampled only where the next step is neither timed nor profiled. So no rank waits
inside a measured step for a rank that samples.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import platform
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from tracer.cpu_units import cpu_units
from tracer.gpu_state import devices_in_use, find_gpus, main_device, place_in_use

SWITCHES = (
    "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NVLS_ENABLE", "NCCL_PROTO",
    "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_HIP_ALLOC_CONF", "PYTORCH_NO_CUDA_MEMORY_CACHING", "TORCHDYNAMO_DISABLE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_COMPILE_DISABLE",
    "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT",
)
"""Environment variables that change performance; none holds a path or a name."""

_DEVICE_PROPERTIES = ("total_memory", "multi_processor_count", "L2_cache_size", "max_threads_per_multi_processor",
                      "shared_memory_per_multiprocessor", "regs_per_multiprocessor", "warp_size", "clock_rate",
                      "memory_clock_rate", "memory_bus_width", "gcnArchName")

_CLOCK_FACTS = ("driver", "sm_mhz", "memory_mhz", "max_sm_mhz", "power_w", "power_limit_w", "temperature_c",
                "slowed_by")


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: torch.distributed's, else torchrun's, else (0, 1).

    Imports no torch.
    """
    dist = sys.modules.get("torch.distributed")  # what is not imported cannot be initialised
    if dist is not None and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def fake_world_here() -> tuple[int, int] | None:
    """Return (world size, rank) of the active fake world; ``None`` without one. Imports no torch."""
    module = sys.modules.get("tracer.fake_world.world")
    found: tuple[int, int] | None = module.current_world() if module is not None else None
    return found


def collect_context() -> dict[str, Any]:
    """Return all facts except the measurements. A fact that cannot be found is left out and is no error."""
    rank, world = rank_and_world()
    found: dict[str, Any] = {"recorded": datetime.date.today().isoformat(), "rank": rank, "world_size": world}
    if fake_world_here() is not None:
        found["fake_world"] = True
    for name, part in (("hardware", _hardware), ("software", _software), ("switches", _switches),
                       ("process_groups", _process_groups), ("backend", _backend)):
        if value := _try(part):
            found[name] = value
    found["torch_threads"] = _try(lambda: int(sys.modules["torch"].get_num_threads()))
    return found


@dataclass(frozen=True, slots=True)
class FreeRunning:
    """Steps timed together: the devices were idle before the first and after the last."""

    steps: int
    ns: int

    @property
    def mean_ns(self) -> float:
        """Return the mean time of a step, ns; the start on an idle device is spread over all steps."""
        return self.ns / self.steps


def measurements(unprofiled_ns: list[int], profiled_ns: list[int], slowdown: float | None,
                 free_running: FreeRunning | None, waited_for: list[int]) -> dict[str, Any]:
    """Return the step times, nanoseconds: all of them, their median, their spread (interquartile range over median),
    and how they were timed."""
    found: dict[str, Any] = {
        "unprofiled_step_ns": unprofiled_ns, "profiled_step_ns": profiled_ns,
        "timing": {"border": "every step ends with the devices idle", "waited_for": waited_for}}
    if free_running is not None:
        found["timing"]["free_running"] = asdict(free_running)
    if unprofiled_ns:
        low, middle, high = np.percentile(unprofiled_ns, (25, 50, 75))
        found["unprofiled_median_ns"] = int(middle)
        found["unprofiled_spread"] = round(float((high - low) / middle), 4) if middle else 0.0
    if slowdown is not None:
        found["profiler_slowdown"] = round(slowdown, 4)
    return found


def peak_memory() -> dict[str, int]:
    """Return peak bytes since the process started: of the device allocator, and resident on the host."""
    import torch

    found: dict[str, int] = {}
    if (number := main_device()) is not None:
        found["allocated_bytes"] = int(torch.cuda.max_memory_allocated(number))
        found["reserved_bytes"] = int(torch.cuda.max_memory_reserved(number))
    with contextlib.suppress(ImportError):  # not on Windows
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        found["host_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    return found


def _try(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception:  # drivers and tools raise many types, and the context is optional
        return None


def _hardware() -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"device": "CPU", "cpu": cpu_model(), "cores": os.cpu_count(),
                             "cpu_units": cpu_units(), "architecture": platform.machine()}
    with contextlib.suppress(AttributeError):  # Linux only
        found["cores_usable"] = len(os.sched_getaffinity(0))
    if (number := main_device()) is not None:
        properties = torch.cuda.get_device_properties(number)
        found["device"] = properties.name
        found["device_count"] = torch.cuda.device_count()
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        for name in _DEVICE_PROPERTIES:
            if hasattr(properties, name):
                found[name.lower()] = getattr(properties, name)
        found["clocks"] = _try(_clocks)
    return found


def cpu_model() -> str:
    """Return the processor's name as the system reports it."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _clocks() -> dict[str, Any]:
    """Return clocks (MHz), power (W), the present reasons that lower clocks, and the driver's version."""
    devices = find_gpus()
    place = None if devices is None else place_in_use(devices)
    told = {} if devices is None or place is None else asdict(devices.state(place))
    return {name: told[name] for name in _CLOCK_FACTS if told.get(name)}


def _software() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version(), "torch": str(torch.__version__), "system": platform.system()}
    for name, part in (("foretrace", lambda: metadata.version("foretrace")), ("cuda", lambda: torch.version.cuda),
                       ("hip", lambda: torch.version.hip), ("triton", lambda: metadata.version("triton")),
                       ("cudnn", torch.backends.cudnn.version),
                       ("nccl", lambda: ".".join(map(str, torch.cuda.nccl.version())))):
        value = _try(part)
        if value:
            found[name] = str(value)
    return found


def _switches() -> dict[str, Any]:
    import torch

    cuda, cudnn, dynamo = torch.backends.cuda, torch.backends.cudnn, sys.modules.get("torch._dynamo")
    parts: dict[str, Callable[[], Any]] = {
        "matmul_tf32": lambda: tf32_in_use()[0],
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "reduced_precision_bf16": lambda: bool(cuda.matmul.allow_bf16_reduced_precision_reduction),
        "reduced_precision_fp16": lambda: bool(cuda.matmul.allow_fp16_reduced_precision_reduction),
        "cudnn_tf32": lambda: tf32_in_use()[1],
        "fp32_precision": lambda: torch.backends.fp32_precision,
        "matmul_fp32_precision": lambda: cuda.matmul.fp32_precision,
        "conv_fp32_precision": lambda: cudnn.conv.fp32_precision,
        "rnn_fp32_precision": lambda: cudnn.rnn.fp32_precision,
        "cudnn_benchmark": lambda: cudnn.benchmark,
        "cudnn_deterministic": lambda: cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "flash_sdp": cuda.flash_sdp_enabled,
        "memory_efficient_sdp": cuda.mem_efficient_sdp_enabled,
        "math_sdp": cuda.math_sdp_enabled,
        "mkldnn": lambda: torch.backends.mkldnn.is_available(),
        "allocator": lambda: torch.cuda.memory.get_allocator_backend() if torch.cuda.is_available() else None,
    }
    found = {name: value for name, part in parts.items() if (value := _try(part)) is not None}
    if dynamo is not None:
        found["compiled_graphs"] = _try(lambda: int(dynamo.utils.counters["stats"]["unique_graphs"])) or 0
        found["inductor_cudagraphs"] = _try(lambda: bool(sys.modules["torch._inductor.config"].triton.cudagraphs))
    found["environment"] = {name: os.environ[name] for name in SWITCHES if name in os.environ}
    return found


def tf32_in_use() -> tuple[bool, bool]:
    """Return whether fp32 matrix products, and convolutions, may run in TF32 on a GPU.

    From torch 2.9 on ``fp32_precision`` decides, and the older switches set it too. Reading the older ones is an error
    if the program has set the newer one.
    """
    import torch

    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    if hasattr(matmul, "fp32_precision"):
        return matmul.fp32_precision == "tf32", cudnn.conv.fp32_precision == "tf32"
    return bool(matmul.allow_tf32), bool(cudnn.allow_tf32)


def _backend() -> str:
    import torch.distributed as dist

    return str(dist.get_backend()) if dist.is_available() and dist.is_initialized() else ""


def _process_groups() -> list[dict[str, Any]]:
    """Return name, description, backend and ranks of this rank's groups, in order of creation."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        return []
    world = dist.distributed_c10d._world
    return [
        {"pg_name": str(name), "pg_desc": str(getattr(group, "group_desc", "")),
         "backend_config": str(world.pg_map[group][0]) if group in world.pg_map else "",
         "pg_size": len(ranks), "ranks": ranks}
        for group, name in world.pg_names.items() if (ranks := dist.get_process_group_ranks(group))
    ]


COLUMNS = ("phase", "sm_mhz", "memory_mhz", "power_w", "temperature_c", "slowed_by")


class ClockLog:
    """Samples the device's state if its management library is installed (``foretrace[gpu]``); else does nothing."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._devices = find_gpus(by_library=True)
        self._place: int | None = None

    def note(self, phase: str) -> None:
        """Take a sample, if the program uses a device. Call it where the next step is not measured.

        A driver that fails is not asked again: the training goes on without samples.
        """
        if self._devices is None or not devices_in_use():
            return
        try:
            if self._place is None:
                self._place = place_in_use(self._devices)
            if self._place is None:
                return
            told = {"phase": phase, **asdict(self._devices.state(self._place))}
        except Exception:  # each library raises its own types, and a sample is optional
            self._devices = None
            return
        self.rows.append([told[name] for name in COLUMNS])

    def to_json(self) -> dict[str, Any]:
        """Return the samples in the form of ``context.json``; empty if there are none."""
        if not self.rows:
            return {}
        return {"gpu_samples": {"device": self._place, "taken": "after the phase named, before a discarded step",
                                "columns": list(COLUMNS), "rows": self.rows}}
