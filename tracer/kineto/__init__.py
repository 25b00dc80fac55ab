"""Reader of PyTorch profiler (Kineto) JSON traces of every era, 2020 to today."""

from tracer.kineto.reader import read_kineto

__all__ = ["read_kineto"]
