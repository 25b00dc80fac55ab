"""Errors of fake worlds and parallel plans."""

from __future__ import annotations

from tracer.errors import ForetraceError


class FakeWorldError(ForetraceError):
    """A fake world cannot be made, or a plan does not fit the world or the workload."""
