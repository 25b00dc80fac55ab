"""``ServingError``: what cannot be served."""

from __future__ import annotations

from tracer.errors import ForetraceError


class ServingError(ForetraceError):
    """A served model, a split of it, or a load, that cannot be: what was asked, why not, what can be."""
