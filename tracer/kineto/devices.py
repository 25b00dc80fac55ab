"""The context of a window from the trace's metadata: device, rank, profiler flags, versions, format."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from tracer.graph import Meta
from tracer.kineto.numbers import integer
from tracer.ranks import leave_out_unbelievable

_LATEST_NS = 1 << 61
"""The year 2043: a later zero of the clock is damage, and added to a timestamp could leave 64 bits."""
_FLAGS = ("record_shapes", "with_stack", "profile_memory", "with_flops", "with_modules")
_VERSIONS = ("cuda_runtime_version", "cuda_driver_version", "cupti_version", "hip_runtime_version",
             "hip_driver_version", "roctracer_version", "rocprofiler_version")


def fill_meta(meta: Meta, metadata: dict[str, Any], is_list: bool, categories: Iterable[str | None],
              devices: np.ndarray) -> None:
    """Set what the top-level fields of the trace tell; ``devices`` are the device ids of the recorded work.

    Fields of unexpected types are left out, never an error.
    """
    found = set(categories)
    if is_list:
        meta.era = "list-2020"
    elif found & {"Operator", "Runtime", "Kernel"}:
        meta.era = "kineto-2021"
    else:
        meta.era = "kineto"
    _device(meta, metadata.get("deviceProperties"), devices)
    info = metadata.get("distributedInfo")
    if isinstance(info, dict):
        meta.rank = integer(info.get("rank"))
        meta.world_size = integer(info.get("world_size"))
        leave_out_unbelievable(meta)
        meta.backend = str(info.get("backend") or "")
        groups = info.get("pg_config")
        if isinstance(groups, list):
            meta.process_groups = [group for group in groups if isinstance(group, dict)]
        if info.get("nccl_version"):
            meta.versions["nccl_version"] = str(info["nccl_version"])
    for key in _VERSIONS:
        if metadata.get(key) not in (None, ""):
            meta.versions[key] = str(metadata[key])
    for key in ("torch_version", "pytorch_version", "PyTorch Version"):
        if metadata.get(key):
            meta.torch_version = str(metadata[key])
    for key in _FLAGS:
        if key in metadata:
            meta.profiler_flags[key] = str(metadata[key]).lower() in ("1", "true")


def base_time_ns(metadata: dict[str, Any]) -> int:
    """``baseTimeNanoseconds``, the zero of relative timestamps; 0 where timestamps count from the epoch."""
    value = integer(metadata.get("baseTimeNanoseconds"))
    return value if 0 <= value < _LATEST_NS else 0


def _device(meta: Meta, properties: Any, devices: np.ndarray) -> None:
    listed = [entry for entry in properties if isinstance(entry, dict)] if isinstance(properties, list) else []
    meta.device_count = len(listed) or len(np.unique(devices))
    if not listed:
        return
    main = int(np.bincount(devices[devices >= 0]).argmax()) if (devices >= 0).any() and devices.max() < 4096 else 0
    # AMD numbers its agents, CPUs included, so that the work's device may not be listed: any GPU of the host then.
    entry = next((e for e in listed if integer(e.get("id")) == main), listed[0])
    meta.device = str(entry.get("name") or "")
    meta.device_memory_bytes = integer(entry.get("totalGlobalMem"))
    meta.sm_count = integer(entry.get("numSms"))
    major, minor = integer(entry.get("computeMajor")), integer(entry.get("computeMinor"))
    if major >= 0 and minor >= 0:
        meta.compute_capability = f"{major}.{minor}"
