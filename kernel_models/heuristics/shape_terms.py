"""The cost of awkward sizes of products and attention: the factors in their formulas that are 1 for full tiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from kernel_models.device import DeviceSpec
from kernel_models.heuristics.attention import idle_units, padded_heads
from kernel_models.heuristics.products import narrow_rows, tiling, whole_depth
from kernel_models.heuristics.roofline import heuristic_models
from kernel_models.heuristics.work import CallTable
from kernel_models.op_call import Family, OpCall
from tracer.arrays import Float64

ROWS, DEPTH, TILES, WAVES, SMALL, HEADS = "rows", "depth", "tiles", "waves", "small tiles", "padded heads"
TERMS: Mapping[str, str] = {
    ROWS: "rows of no whole 16 bytes", DEPTH: "contractions of no whole tile's depth", TILES: "partly empty tiles",
    WAVES: "idle units of the last wave", SMALL: "small tiles and split sums", HEADS: "padded heads"}
"""Terms, and the cause of each one's lost time."""


def shape_terms(calls: Sequence[OpCall], device: DeviceSpec) -> dict[str, Float64]:
    """Return factors ≥ 1 on the time of every call's arithmetic [n], by name of the cost; 1 for other families."""
    found: dict[str, Float64] = {name: np.ones(len(calls)) for name in TERMS}
    for family in (Family.GEMM, Family.ATTENTION):
        rows = np.array([i for i, call in enumerate(calls) if call.family is family], np.int64)
        if not len(rows):
            continue
        table = CallTable.of(family, [calls[i] for i in rows.tolist()])
        if family is Family.ATTENTION:
            found[HEADS][rows], found[WAVES][rows] = padded_heads(table), idle_units(table, device)
            continue
        terms = tiling(table.dim("batch"), table.dim("m"), table.dim("n"), device)
        found[TILES][rows], found[WAVES][rows], found[SMALL][rows] = terms
        found[ROWS][rows] = narrow_rows(table, device)
        found[DEPTH][rows] = whole_depth(table, device) / table.dim("k")
    return found


def arithmetic_share(calls: Sequence[OpCall], device: DeviceSpec) -> Float64:
    """Return the share of arithmetic in every call's time, by its formula, from 0 to 1 [n]."""
    share = np.zeros(len(calls))
    models = heuristic_models(device)
    for family in (Family.GEMM, Family.ATTENTION):
        rows = [i for i, call in enumerate(calls) if call.family is family]
        if rows:
            mine = [calls[i] for i in rows]
            share[rows] = np.minimum(models[family].parts(mine)[0].compute_us / models[family].predict(mine).time_us, 1)
    return share
