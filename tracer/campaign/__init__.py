"""The recording campaign: a plan of workload captures and micro-benchmarks, run within a time box.

Reading plans, listing them and looking at results needs no torch; only the worker processes import it:

    >>> from tracer import campaign
    >>> plan = campaign.read_plan("smoke")
    >>> [item.name for item in campaign.expand(plan)][:3]                            # doctest: +SKIP
    >>> campaign.run(plan, "runs/smoke", campaign.RunOptions(minutes=1))             # doctest: +SKIP
    >>> campaign.read_kernels("runs/smoke", "gemm")                                  # doctest: +SKIP

A campaign's directory (written whole file by whole file, so that it is sound at any moment, even after SIGKILL):

- campaign.json: The plan, each session's machine and software, counts.
- items.jsonl: One line for each item that ended: settings, split, status, times, file.
- graphs/NAME-ID.foretrace: The full graph of a workload, with its unprofiled step times.
- tables/NAME-ID.parquet: Its operation and kernel table instead, once the graphs' share of the size is used.
- kernels/FAMILY.parquet: The micro-benchmarks of a family (FAMILY.*.part.parquet until a run ends).
"""

from __future__ import annotations

from tracer.campaign.items import Item, expand, parts
from tracer.campaign.plan import CampaignError, Plan, packaged_plans, read_plan
from tracer.campaign.results import ItemResult, Results
from tracer.campaign.runner import CampaignOutcome, RunOptions, run, run_items
from tracer.campaign.source import ItemSource, PlanItems, Setup
from tracer.campaign.tables import read_kernels

__all__ = [
    "CampaignError",
    "CampaignOutcome",
    "Item",
    "ItemResult",
    "ItemSource",
    "Plan",
    "PlanItems",
    "Results",
    "RunOptions",
    "Setup",
    "expand",
    "packaged_plans",
    "parts",
    "read_kernels",
    "read_plan",
    "run",
    "run_items",
]
