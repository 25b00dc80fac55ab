"""The combinations an entry of a plan stands for."""

from __future__ import annotations

import itertools
import random
from typing import Any

from tracer.campaign.errors import CampaignError
from tracer.campaign.plan import Grid


def combinations(entry: Grid, where: str) -> list[dict[str, Any]]:
    """Every configuration of an entry, rows first, in the order written.

    Args:
        where: names the entry in errors.

    Raises:
        CampaignError: a row does not fit the columns, a list is empty, or a setting is named twice.
    """
    for row in entry.rows:
        if len(row) != len(entry.columns):
            raise CampaignError(f"{where}: the row {row} has {len(row)} values for {len(entry.columns)} columns "
                                f"({', '.join(entry.columns) or 'none'}).")
    if entry.columns and not entry.rows:
        raise CampaignError(f"{where}: there are columns ({', '.join(entry.columns)}) and no rows.")
    if bool(entry.draw) != (entry.count > 0):
        raise CampaignError(f"{where}: draw and count go together: name the sizes to draw, and how many.")
    if entry.rows and entry.draw:
        raise CampaignError(f"{where}: give rows or draw, not both; write two entries.")
    named = [*entry.columns, *entry.draw, *entry.product]
    for name in named:
        if named.count(name) > 1:
            raise CampaignError(f"{where}: {name!r} is set twice; name it in one of columns, draw and product.")
    for name, values in entry.product.items():
        if not values:
            raise CampaignError(f"{where}: the list of {name!r} is empty.")
    rows = [dict(zip(entry.columns, row, strict=True)) for row in entry.rows] or _drawn(entry, where) or [{}]
    products = [dict(zip(entry.product, values, strict=True)) for values in itertools.product(*entry.product.values())]
    return [{**row, **values} for row in rows for values in products]


def _drawn(entry: Grid, where: str) -> list[dict[str, Any]]:
    """Log-uniform sizes from a generator seeded with their names and bounds: the same rows for the same entry."""
    for name, (low, high, unit) in entry.draw.items():
        if not 1 <= unit <= low <= high or low % unit:
            raise CampaignError(f"{where}: draw.{name} = [{low}, {high}, {unit}] must be [least, most, multiple of], "
                                "the least a multiple too.")
    generator = random.Random(repr(sorted(entry.draw.items())))
    return [{name: max(low, min(high, round(low * (high / low) ** generator.random() / unit) * unit))
             for name, (low, high, unit) in entry.draw.items()} for _ in range(entry.count)]


def spread(count: int) -> list[int]:
    """The numbers below ``count`` ordered so that any beginning of them is spread over all: ends, middle, quarters …

    >>> spread(6)
    [0, 5, 2, 1, 3, 4]
    """
    order = [0, count - 1] if count > 1 else list(range(count))
    parts = 2
    while len(order) < count:
        order += [number * (count - 1) // parts for number in range(1, parts)]
        order = list(dict.fromkeys(order))
        parts *= 2
        if parts > 2 * count:
            order = list(dict.fromkeys([*order, *range(count)]))
    return order
