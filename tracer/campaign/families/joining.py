"""Concatenation of tensors, and memory set to zero."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, DTYPES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab


def _concat(settings: dict[str, Any], lab: Lab) -> Bench:
    """``tensors`` tensors of [rows, width] each, joined along one of the two."""
    rows, width, count = settings["rows"], settings["width"], settings["tensors"]
    parts = [lab.random(rows, width, dtype=settings["dtype"]) for _ in range(count)]
    along = 0 if settings["along"] == "rows" else 1
    return Bench(lambda: lab.torch.cat(parts, along), 0.0, 2.0 * BYTES[settings["dtype"]] * rows * width * count)


def _memset(settings: dict[str, Any], lab: Lab) -> Bench:
    target = lab.torch.empty(settings["bytes"], dtype=lab.torch.uint8, device=lab.device)
    return Bench(lambda: lab.machine.memset(target), 0.0, float(settings["bytes"]))


FAMILIES = [
    CampaignFamily(
        "concat",
        "tensors joined along their rows or their width",
        {"rows": SizeRange(16), "width": SizeRange(32), "tensors": SizeRange(3)},
        {"along": FamilyChoice(("rows", "width")), "dtype": FamilyChoice(DTYPES)},
        _concat,
    ),
    CampaignFamily(
        "memset", "memory of the device set to zero by its own call", {"bytes": SizeRange(4096)}, {}, _memset
    ),
]
