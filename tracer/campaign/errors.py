"""The campaign's own error."""

from __future__ import annotations

from tracer.errors import ForetraceError


class CampaignError(ForetraceError):
    """A plan has a mistake, or a campaign cannot run or be resumed."""
