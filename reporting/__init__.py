"""What people see of steps: reports, differences, gates, exports, sweeps, pages and the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tracer.lazy import lazily

if TYPE_CHECKING:
    from reporting.diff.jobs import diff_jobs
    from reporting.reports.breakdown import Breakdown, breakdown
    from reporting.reports.opportunities import Opportunities, Opportunity, opportunities
    from reporting.reports.timeline import write_timeline

_HOMES = {
    "Breakdown": "reporting.reports.breakdown",
    "Opportunities": "reporting.reports.opportunities",
    "Opportunity": "reporting.reports.opportunities",
    "breakdown": "reporting.reports.breakdown",
    "diff_jobs": "reporting.diff.jobs",
    "opportunities": "reporting.reports.opportunities",
    "write_timeline": "reporting.reports.timeline",
}

__all__ = ["Breakdown", "Opportunities", "Opportunity", "breakdown", "diff_jobs", "opportunities", "write_timeline"]

__getattr__, __dir__ = lazily(__name__, _HOMES)
