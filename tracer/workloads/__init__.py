"""The workload suite: twelve plain PyTorch training steps of adjustable size, deterministic and without downloads.

Listing and configuring them imports no torch; ``build`` and ``create`` do:

    >>> from tracer import workloads
    >>> workload = workloads.build("llama", preset="tiny", dtype="bf16")      # doctest: +SKIP
    >>> for _, batch in zip(range(3), workload.batches()):                    # doctest: +SKIP
    ...     loss = workload.step(batch)

``settings.py`` has what all share, ``catalogue.py`` each workload's sizes, ``models/`` what they compute.
"""

from __future__ import annotations

from tracer.workloads.registry import (
    WorkloadInfo,
    as_plain,
    build,
    configure,
    create,
    describe,
    names,
    parse,
    size_text,
    split,
)
from tracer.workloads.settings import DtypeMode, OptimizerKind, Setting, Settings, WorkloadError

__all__ = [
    "DtypeMode", "OptimizerKind", "Setting", "Settings", "WorkloadError", "WorkloadInfo", "as_plain", "build",
    "configure", "create", "describe", "names", "parse", "size_text", "split",
]
