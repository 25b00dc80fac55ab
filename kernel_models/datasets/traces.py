"""Traces as measurements: pieces whose kernels belong to one call with recorded sizes.

An operation of several calls (a layer norm's gradient, a fused optimizer) has one time for all of them, which cannot be
told apart: such pieces are left out, and so are those known by their kernel's name only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from kernel_models.datasets.samples import Samples
from kernel_models.device import DeviceError, resolve_device
from kernel_models.trace_calls import Basis, graph_calls
from tracer.job import Job

LEAST_US = 0.3
"""Shorter kernels are below the profilers' resolution."""


def read_job_samples(job: Job) -> Iterator[Samples]:
    """Samples of every family, device and software in a job's graphs; the shape group is the sizes.

    Graphs without a known device are left out (see ``device_of`` for the error).
    """
    for graph in job.graphs:
        try:
            spec = resolve_device(graph.meta.device, graph.meta.device_memory_bytes, graph.meta.sm_count)
        except DeviceError:
            continue
        found = graph_calls(graph)
        single = (np.diff(found.call_offset) == 1) & (found.basis != Basis.NAME)
        rows = np.flatnonzero(single & (found.time_ns >= LEAST_US * 1e3))
        calls = [found.calls[i] for i in found.call_index[found.call_offset[rows]].tolist()]
        times = found.time_ns[rows] / 1e3
        software = f"torch {graph.meta.torch_version}" if graph.meta.torch_version else "torch"
        by_family: dict[str, list[int]] = {}
        for i, call in enumerate(calls):
            by_family.setdefault(call.family.value, []).append(i)
        for places in by_family.values():
            mine = [calls[i] for i in places]
            yield Samples(spec.name, software, graph.meta.source, mine, times[places],
                          {"shape": ["x".join(map(str, call.dims)) for call in mine]}).aggregated()


def devices_of(jobs: Sequence[Job]) -> list[str]:
    """What the graphs say of their devices, for an error."""
    return sorted({graph.meta.device or "no name" for job in jobs for graph in job.graphs})
