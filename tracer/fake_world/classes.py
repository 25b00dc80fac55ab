"""Classes of a plan's ranks that do the same work, derived from the shapes of their shards without tracing.

Stages of a pipeline differ; replicas under DDP do not. Under FSDP2 and tensor parallelism, ranks do the same work if
their shards of every parameter have the same shapes. Shards are cut as by ``torch.chunk``: the last ones may be smaller
or empty. Experts that are spread over ranks are sharded over the ranks with the same experts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tracer import workloads
from tracer.fake_world.fit import check_plan, stage_sizes
from tracer.parallel_plan import MeshPlace, ParallelPlan
from tracer.ranks import RankClass, spans
from tracer.workloads.places import pieces_of
from tracer.workloads.settings import OptimizerKind, Settings

_BY_ROWS = ("q.weight", "k.weight", "v.weight", "gate.weight", "up.weight", "tokens.weight", "head.weight")
"""Parameters that tensor parallelism cuts along the first dimension; ``out`` and ``down`` it cuts along the second."""
_BY_COLUMNS = ("out.weight", "down.weight")

Shape = tuple[int, ...]


def rank_classes(plan: ParallelPlan, settings: Settings) -> list[RankClass]:
    """Return the classes of ranks that do the same work, by their lowest rank, each with the row for its graph.

    Raises:
        PlanError: the plan does not fit the workload.
    """
    check_plan(settings, plan)
    shapes = _parameter_shapes(settings)
    tables = _table_pieces(settings, plan)
    found: dict[tuple[object, ...], list[int]] = {}
    for pp in range(plan.pp):
        stage = [(name, shape) for name, shape in shapes.items() if _is_in_stage(name, settings, plan, pp)]
        for tp in range(plan.tp):
            local = sorted({_local_shape(name, shape, plan.tp, tp) for name, shape in stage
                            if not _is_spread(name, plan)})
            experts = {(shape[0] // plan.ep, *shape[1:]) for name, shape in stage if _is_spread(name, plan)}
            for dp in range(plan.dp):
                rows = _rows(local, plan.dp, dp) + _rows(experts, plan.dp // plan.ep, dp // plan.ep) if (
                    plan.fsdp2) else ()
                found.setdefault((pp, *local, rows, *tables.get(dp, ())), []).append(plan.rank(MeshPlace(pp, dp, tp)))
    ordered = sorted(found.values(), key=min)
    return [RankClass(spans(ranks), row) for row, ranks in enumerate(ordered)]


def _table_pieces(settings: Settings, plan: ParallelPlan) -> dict[int, list[tuple[float, ...]]]:
    """Return by rank (rows, columns, a sample's look-ups) of each part of a table; empty if tables are not spread."""
    text, tables = getattr(settings, "sharding", ""), settings.embedding_tables()
    found: dict[int, list[tuple[float, ...]]] = {}
    if text:
        for piece in pieces_of(tables, text, plan.dp):
            found.setdefault(piece.rank, []).append(
                (piece.rows, piece.columns, tables[piece.table].bag * piece.rows / tables[piece.table].rows))
    return {rank: sorted(own) for rank, own in found.items()}


def chunk(size: int, parts: int, place: int) -> int:
    """Return the elements of part ``place`` when ``torch.chunk`` cuts ``size`` into ``parts``."""
    each = -(-size // parts)
    return max(0, min(each, size - place * each))


def _rows(shapes: Iterable[Shape], parts: int, place: int) -> tuple[int, ...]:
    return tuple(chunk(size, parts, place) for size in sorted({shape[0] for shape in shapes}))


def _local_shape(name: str, shape: Shape, tp: int, place: int) -> Shape:
    if tp > 1 and name.endswith(_BY_ROWS):
        return (chunk(shape[0], tp, place), *shape[1:])
    if tp > 1 and name.endswith(_BY_COLUMNS):
        return (shape[0], chunk(shape[1], tp, place), *shape[2:])
    return shape


def _is_spread(name: str, plan: ParallelPlan) -> bool:
    return plan.ep > 1 and ".experts." in name


def _parameter_shapes(settings: Settings) -> dict[str, Shape]:
    """Return the shape of every parameter by name; a scalar counts as one row. Nothing is allocated."""
    bare = replace(settings, device="meta", optimizer=OptimizerKind.SGD, compile=False)
    return {name: tuple(value.shape) or (1,) for name, value in workloads.create(bare).model.named_parameters()}


def _is_in_stage(name: str, settings: Settings, plan: ParallelPlan, stage: int) -> bool:
    if plan.pp == 1:
        return True
    if name.startswith("blocks."):
        sizes = stage_sizes(settings.depth, plan.pp)  # type: ignore[attr-defined]
        first = sum(sizes[:stage])
        return first <= int(name.split(".")[1]) < first + sizes[stage]
    return stage == (0 if name.startswith("tokens.") else plan.pp - 1)
