"""Reader of PyTorch profiler (Kineto) JSON traces of every era, 2020 to today."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from tracer.kineto.reader import read_kineto, read_processes, ready_to_read

__all__ = ["read_kineto", "read_processes", "ready_to_read"]

__getattr__, __dir__ = lazily(__name__, dict.fromkeys(__all__, "tracer.kineto.reader"))
