"""The families of micro-benchmarks. Declaring and checking them imports no torch: a ``Lab`` brings it to ``bench``.

One module a group; a family is a ``CampaignFamily`` in its module's ``FAMILIES``.
"""

from __future__ import annotations

from tracer.campaign.families import elementwise, memory, norms, overheads, products
from tracer.campaign.families.family import Bench, CampaignFamily

FAMILIES: dict[str, CampaignFamily] = {family.name: family for module in (
    products, norms, elementwise, memory, overheads) for family in module.FAMILIES}
"""Every family by name."""

__all__ = ["FAMILIES", "Bench", "CampaignFamily"]
