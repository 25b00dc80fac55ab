"""Index, gather and scatter; sort and top-k."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tracer.campaign.families.family import BYTES, DTYPES, Bench, CampaignFamily, FamilyChoice, SizeRange

if TYPE_CHECKING:
    from tracer.campaign.lab import Lab


def _index(settings: dict[str, Any], lab: Lab) -> Bench:
    """``count`` rows of a [rows, width] table are read or written."""
    torch, op, dtype = lab.torch, settings["op"], settings["dtype"]
    rows, width, count, element = settings["rows"], settings["width"], settings["count"], BYTES[settings["dtype"]]
    table = lab.random(rows, width, dtype=dtype)
    chosen = lab.indices(count, high=rows, law=settings["law"])
    source = lab.random(count, width, dtype=dtype)
    wide = chosen[:, None].expand(count, width)
    functions: dict[str, Callable[[], Any]] = {
        "index_select": lambda: torch.index_select(table, 0, chosen),
        "index": lambda: table[chosen],
        "gather": lambda: torch.gather(table, 0, wide),
        "scatter": lambda: table.scatter_(0, wide, source),
        "scatter_add": lambda: table.scatter_add_(0, wide, source),
        "index_add": lambda: table.index_add_(0, chosen, source),
        "index_put": lambda: table.index_put_((chosen,), source, accumulate=True),
    }
    moved = 2.0 * element * count * width + 8.0 * count
    adds = op in ("scatter_add", "index_add", "index_put")
    return Bench(functions[op], float(count * width) if adds else 0.0, moved + element * count * width * adds)


def _sort(settings: dict[str, Any], lab: Lab) -> Bench:
    torch, rows, width = lab.torch, settings["rows"], settings["width"]
    chosen = min(settings["k"], width)
    x = lab.random(rows, width, dtype=settings["dtype"])
    element = BYTES[settings["dtype"]]
    functions: dict[str, Callable[[], Any]] = {
        "sort": lambda: torch.sort(x, dim=-1), "topk": lambda: torch.topk(x, chosen, dim=-1)}
    kept = chosen if settings["op"] == "topk" else width
    return Bench(functions[settings["op"]], float(x.numel()), float(element * x.numel() + rows * kept * (element + 8)))


FAMILIES = [
    CampaignFamily(
        "index",
        "rows of a table by number: index, gather, scatter and their sums",
        {"rows": SizeRange(100), "width": SizeRange(16), "count": SizeRange(64)},
        {
            "op": FamilyChoice(("index_select", "index", "gather", "scatter", "scatter_add", "index_add", "index_put")),
            "law": FamilyChoice(("uniform", "zipf")),
            "dtype": FamilyChoice(DTYPES),
        },
        _index,
    ),
    CampaignFamily(
        "sort",
        "sort and top-k of each row",
        {"rows": SizeRange(8), "width": SizeRange(64), "k": SizeRange(4, 8)},
        {"op": FamilyChoice(("sort", "topk")), "dtype": FamilyChoice(DTYPES)},
        _sort,
    ),
]
