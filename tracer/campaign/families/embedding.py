"""Embedding look-ups and pooled look-ups (bags), forward and backward, with uniform and skewed rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab


def _prepare(settings: dict[str, Any], lab: Lab) -> Bench:
    """``pooling`` 0 is a plain look-up; else bags of so many look-ups are summed. Tables larger than L2 miss it.

    ``backward`` makes a dense gradient of the whole table, ``backward_sparse`` one of the looked-up rows.
    """
    torch = lab.torch
    rows, width, lookups, pooling = (settings[name] for name in ("rows", "width", "lookups", "pooling"))
    backward, element = settings["op"] != "forward", BYTES[settings["dtype"]]
    sparse = settings["op"] == "backward_sparse"
    table = lab.random(rows, width, dtype=settings["dtype"], grad=backward)
    chosen = lab.indices(lookups, high=rows, law=settings["law"])
    functional = torch.nn.functional
    bags = -(-lookups // pooling) if pooling else lookups
    if pooling:
        offsets = torch.arange(0, lookups, pooling, device=lab.device)

    def forward() -> Any:
        if pooling:
            return functional.embedding_bag(chosen, table, offsets, mode="sum", sparse=sparse)
        return functional.embedding(chosen, table, sparse=sparse)

    read = element * width * lookups + 8.0 * lookups
    if not backward:
        return Bench(forward, float(width * lookups) if pooling else 0.0, read + element * width * bags)
    output = forward()
    gradient = lab.random_like(output)
    written = element * width * (lookups if sparse else rows)
    return Bench(lab.gradients(output, (table,), gradient), float(width * lookups),
                 element * width * bags + 8.0 * lookups + written)


FAMILIES = [CampaignFamily(
    "embedding", "look-ups and summed bags, forward and backward; uniform and Zipf rows; tables in and beyond L2",
    {"rows": SizeRange(100), "width": SizeRange(16), "lookups": SizeRange(64), "pooling": SizeRange(4, 0, 0)},
    {"op": FamilyChoice(("forward", "backward", "backward_sparse")), "law": FamilyChoice(("uniform", "zipf")),
     "dtype": FamilyChoice(("fp32", "bf16"))},
    _prepare)]
