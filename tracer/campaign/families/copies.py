"""Copies between host and device, and within the device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """A copy from or to pageable memory holds the host up; the others are queued."""
    torch, size, direction = lab.torch, settings["bytes"], settings["direction"]
    pinned = settings["memory"] == "pinned"
    on_device = torch.randint(256, (size,), dtype=torch.uint8, device=lab.device)
    if direction == "d2d":
        target = torch.empty_like(on_device)
        return Bench(lambda: target.copy_(on_device), 0.0, 2.0 * size)
    on_host = lab.pinned(torch.randint(256, (size,), dtype=torch.uint8)) if pinned else torch.randint(
        256, (size,), dtype=torch.uint8)
    source, target = (on_host, on_device) if direction == "h2d" else (on_device, on_host)
    return Bench(lambda: target.copy_(source, non_blocking=pinned), 0.0, float(size), asynchronous=pinned)


def _fits(settings: dict[str, Any]) -> str:
    if settings["direction"] == "d2d" and settings["memory"] == "pageable":
        return "direction=d2d has no host memory; leave memory=pinned, the default."
    return ""


FAMILIES = [
    CampaignFamily(
        "copy",
        "copies host to device, device to host and within the device; pinned and pageable host memory",
        {"bytes": SizeRange(4096)},
        {"direction": FamilyChoice(("h2d", "d2h", "d2d")), "memory": FamilyChoice(("pinned", "pageable"))},
        _prepare,
        _fits,
    )
]
