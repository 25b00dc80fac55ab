"""Measured kernels of tables and traces, with what a CPU's recorded operations compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graph_predictor.prediction.host_steps import recorded_host_work
from kernel_models.datasets import Samples, read_samples
from kernel_models.device import DeviceSpec


def read_kernels(
    paths: Sequence[str], progress: Callable[[str], None] = lambda text: None, *, spec: DeviceSpec | None = None,
    notes: list[str] | None = None,
) -> list[Samples]:
    """Return samples as ``kernel_models.datasets.read_samples`` does, arguments and errors too, and of CPUs' traces.

    There the operations are the kernels: their time is their own, without waits and the profiler's cost.
    """
    return read_samples(paths, progress, spec=spec, notes=notes, host_work=recorded_host_work)
