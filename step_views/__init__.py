"""Views of steps for people: reports, differences, gates, exports, sweeps, pages and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from step_views.diff.jobs import diff_jobs
    from step_views.reports.breakdown import Breakdown, breakdown
    from step_views.reports.opportunities import Opportunities, Opportunity, opportunities
    from step_views.reports.timeline import write_timeline

_HOMES = {
    "Breakdown": "step_views.reports.breakdown",
    "Opportunities": "step_views.reports.opportunities",
    "Opportunity": "step_views.reports.opportunities",
    "breakdown": "step_views.reports.breakdown",
    "diff_jobs": "step_views.diff.jobs",
    "opportunities": "step_views.reports.opportunities",
    "write_timeline": "step_views.reports.timeline",
}

__all__ = ["Breakdown", "Opportunities", "Opportunity", "breakdown", "diff_jobs", "opportunities", "write_timeline"]

__getattr__, __dir__ = lazily(__name__, _HOMES)
