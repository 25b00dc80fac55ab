"""What real functions take, of which no package is at hand where tests run."""

from __future__ import annotations

import ctypes

TORCH_2_6: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("is_available", "is_initialized", "current_device", "device_count", "empty_cache", "CUDAGraph",
                     "CUDAGraph.replay", "Event.query", "Event.synchronize", "Stream.synchronize"), ()),
    **dict.fromkeys(("clock_rate", "current_stream", "get_device_properties", "max_memory_allocated",
                     "max_memory_reserved", "mem_get_info", "memory_allocated", "set_device", "synchronize"),
                    ("device",)),
    "_sleep": ("cycles",), "stream": ("stream",), "Stream": ("device", "priority"), "Stream.wait_event": ("event",),
    "Stream.wait_stream": ("stream",), "Event": ("enable_timing", "blocking", "interprocess"),
    "Event.record": ("stream",), "Event.elapsed_time": ("end_event",),
    "graph": ("cuda_graph", "pool", "stream", "capture_error_mode")}
"""Parameters of ``torch.cuda`` in the oldest release that foretrace takes (torch/cuda/*.py of 2.6.0)."""

DRIVER: dict[str, str] = {
    "cuMemsetD8Async": "CUdeviceptr dstDevice, unsigned char uc, size_t N, CUstream hStream",
    "hipMemsetD8Async": "hipDeviceptr_t dest, unsigned char value, size_t count, hipStream_t stream"}
"""Parameters of the drivers' functions that foretrace calls (cuda.h of CUDA 13.0, hip_runtime_api.h of ROCm 6.4)."""
_C_TYPES = {"CUdeviceptr": ctypes.c_void_p, "hipDeviceptr_t": ctypes.c_void_p, "unsigned char": ctypes.c_ubyte,
            "size_t": ctypes.c_size_t, "CUstream": ctypes.c_void_p, "hipStream_t": ctypes.c_void_p}


def taken_by_driver(function: str) -> tuple[type, ...]:
    """Return the types of ``ctypes`` that a driver's function takes."""
    return tuple(_C_TYPES[each.strip().rpartition(" ")[0]] for each in DRIVER[function].split(","))
