"""The families of micro-benchmarks. Declaring and checking them imports no torch: a ``Lab`` brings it to ``prepare``.

One module a group; a family is a ``CampaignFamily`` in its module's ``FAMILIES``.
"""

from __future__ import annotations

from tracer.campaign.families.attention import FAMILIES as _ATTENTION
from tracer.campaign.families.convolution import FAMILIES as _CONVOLUTION
from tracer.campaign.families.copies import FAMILIES as _COPIES
from tracer.campaign.families.elementwise import FAMILIES as _ELEMENTWISE
from tracer.campaign.families.embedding import FAMILIES as _EMBEDDING
from tracer.campaign.families.family import Bench, CampaignFamily
from tracer.campaign.families.foreach import FAMILIES as _FOREACH
from tracer.campaign.families.fused import FAMILIES as _FUSED
from tracer.campaign.families.gemm import FAMILIES as _GEMM
from tracer.campaign.families.images import FAMILIES as _IMAGES
from tracer.campaign.families.indexing import FAMILIES as _INDEXING
from tracer.campaign.families.joining import FAMILIES as _JOINING
from tracer.campaign.families.losses import FAMILIES as _LOSSES
from tracer.campaign.families.norms import FAMILIES as _NORMS
from tracer.campaign.families.optimizers import FAMILIES as _OPTIMIZERS
from tracer.campaign.families.overheads import FAMILIES as _OVERHEADS
from tracer.campaign.families.sequences import FAMILIES as _SEQUENCES

FAMILIES: dict[str, CampaignFamily] = {family.name: family for family in (
    *_GEMM, *_ATTENTION, *_CONVOLUTION, *_NORMS, *_ELEMENTWISE, *_EMBEDDING, *_INDEXING, *_COPIES, *_OPTIMIZERS,
    *_FOREACH, *_IMAGES, *_JOINING, *_LOSSES, *_SEQUENCES, *_FUSED, *_OVERHEADS)}
"""Every family by name."""

__all__ = ["FAMILIES", "Bench", "CampaignFamily"]
