"""The calibration's own error."""

from __future__ import annotations

from tracer.errors import ForetraceError


class CalibrationError(ForetraceError):
    """A calibration cannot be done as asked for, or on this device."""
