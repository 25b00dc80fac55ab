"""Errors of fake worlds."""

from __future__ import annotations

from tracer.errors import ForetraceError


class FakeWorldError(ForetraceError):
    """A fake world cannot be made."""
