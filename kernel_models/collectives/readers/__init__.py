"""Readers of measured collectives: nccl-tests, rccl-tests, PARAM, NCCL's inspector, OSU's MPI benchmarks,
ucc_perftest and tables (traces are read by ``readers.traces``). Each is imported when a log is read."""

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from kernel_models.collectives.readers.hints import Hints
    from kernel_models.collectives.readers.logs import read_log

_HOMES = {"Hints": "kernel_models.collectives.readers.hints", "read_log": "kernel_models.collectives.readers.logs"}
__getattr__, __dir__ = lazily(__name__, _HOMES)

__all__ = ["Hints", "read_log"]
