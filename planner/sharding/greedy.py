"""Greedy seeds: tables one after the other, the largest first, each where the objective is then least."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.sharding.choices import Choices, Scope
from planner.sharding.loads import EMPTY
from planner.sharding.scoring import Scores, Standing
from tracer.arrays import Bool, Float64, Int64
from tracer.lookup_data.plan_file import ShardKind


def least_loaded(parts: int, free: Bool, sums: Float64, cost: float, draw: np.random.Generator | None = None,
                 ) -> list[int] | None:
    """Give the parts of a table to different ranks, each to the free one whose sum is least, or to one drawn.

    Args:
        parts: how many.
        free: ranks that may have one [ranks]; it is not changed.
        sums: of the ranks' costs [ranks]; the parts' are added.
        cost: of a part.
        draw: draws the ranks instead.

    Returns:
        The ranks; ``None`` where too few are free.
    """
    found: list[int] = []
    free = free.copy()
    for _ in range(parts):
        if not free.any():
            return None
        rank = int(draw.choice(np.flatnonzero(free)) if draw else np.where(free, sums, np.inf).argmin())
        free[rank] = False
        sums[rank] += cost
        found.append(rank)
    return found


def greedy(scores: Scores, order: Sequence[int], options: Sequence[Sequence[int]]) -> Standing | None:
    """Place tables in an order.

    Args:
        order: rows of tables.
        options: the choices of each table that are tried, all of them where it is its turn.

    Returns:
        ``None`` if a table fits nowhere.
    """
    now = scores.standing(EMPTY)
    for table in order:
        best: Standing | None = None
        for choice in options[table]:
            found = scores.with_choice(now, choice)
            if found is not None and (best is None or found.score < best.score):
                best = found
        if best is None:  # what was wanted fits nowhere: any other way that does
            for choice in scores.choices.of_table(table):
                found = scores.with_choice(now, choice)
                if found is not None and (best is None or found.score < best.score):
                    best = found
        if best is None:
            return None
        now = best
    return now


def orders(choices: Choices, alike: Int64) -> list[Int64]:
    """Orders of tables by several costs of their first way, the largest first.

    Args:
        alike: the choice that stands for each table [tables].
    """
    columns = [choices.work[alike], choices.memory[alike], choices.sent_bytes[alike], choices.index_bytes[alike]]
    mixed = sum((column / max(float(column.sum()), 1e-12) for column in columns), np.zeros(len(alike)))
    return [np.argsort(-column, kind="stable") for column in (mixed, *columns)]


def unsplit(choices: Choices) -> list[list[int]]:
    """The first way of each table that fits a rank: whole if it can, else in as few parts as it takes."""
    return [[_first_fit(choices, table)] for table in range(len(choices.first) - 1)]


def split_above(choices: Choices, ranks: int, share: float, prefer: ShardKind) -> list[list[int]]:
    """Likewise, but no unit may take more than a share of a rank's mean work, vectors or indices."""
    alike = np.array([each[0] for each in unsplit(choices)])
    means = [max(float((column[alike] * choices.parts[alike]).sum()) / ranks, 1e-12)
             for column in _columns(choices)]
    found = []
    for table in range(len(alike)):
        options = [row for row in choices.of_table(table) if choices.kinds[row] is not ShardKind.DATA_PARALLEL]
        options = [row for row in options if choices.fits[row]] or list(choices.of_table(table))
        small = [row for row in options if all(
            column[row] <= share * mean for column, mean in zip(_columns(choices), means, strict=True))]
        wanted = [row for row in small if choices.kinds[row] in (ShardKind.TABLE_WISE, prefer)]
        # The first that is small enough has the fewest parts.
        found.append([(wanted or small or [int(alike[table])])[0]])
    return found


def spilled(choices: Choices, ranks: int, per_node: int) -> list[list[int]]:
    """Those tables on the devices that gain most for their bytes, others in the hosts' memory, cached or not.

    Buffers of all tables lie on the devices in any case, and a twentieth is left free: parts do not fill them.
    """
    width = np.select([choices.scope == Scope.ALL, choices.scope == Scope.NODE], [ranks, per_node], choices.parts)
    whole = choices.memory * width
    near = [each[0] for each in unsplit(choices)]
    far = [[row for row in choices.of_table(table) if choices.locations[row] != "hbm" and choices.fits[row]]
           for table in range(len(near))]
    left = 0.95 * choices.room[0] * ranks - float((choices.buffer_bytes * width)[near].sum())
    gains = [0.0 if not each else float(min(choices.work[row] * width[row] for row in each)
                                        - choices.work[row_near] * width[row_near])
             / max(float(whole[row_near]), 1.0) for row_near, each in zip(near, far, strict=True)]
    found: list[list[int]] = [[] for _ in near]
    for table in sorted(range(len(near)), key=lambda table: (bool(far[table]), -gains[table])):
        need = float(choices.memory[near[table]] - choices.buffer_bytes[near[table]]) * float(width[near[table]])
        fits = choices.locations[near[table]] == "hbm" and need <= left
        if fits or not far[table]:
            left -= need
        found[table] = [near[table]] if fits or not far[table] else far[table]
    return found


def every_way(choices: Choices) -> list[list[int]]:
    """All ways of each table."""
    return [list(choices.of_table(table)) for table in range(len(choices.first) - 1)]


def _columns(choices: Choices) -> tuple[Float64, ...]:
    return choices.work, choices.sent_bytes, choices.index_bytes


def _first_fit(choices: Choices, table: int) -> int:
    rows = [row for row in choices.of_table(table) if choices.kinds[row] is not ShardKind.DATA_PARALLEL]
    rows = rows or list(choices.of_table(table))
    return next((row for row in rows if choices.fits[row]), rows[-1])
