"""Reader of PyTorch profiler (Kineto) JSON traces of every era, 2020 to today."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from tracer.kineto.reader import read_kineto, read_processes

__all__ = ["read_kineto", "read_processes"]

__getattr__, __dir__ = lazily(__name__, {
    "read_kineto": "tracer.kineto.reader", "read_processes": "tracer.kineto.reader"})
