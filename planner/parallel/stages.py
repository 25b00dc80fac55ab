"""The blocks of each pipeline stage: how a decoder's layers are spread over stages and their chunks.

Layers come in order: chunk 0 of every stage, then chunk 1 of every stage. By default each chunk gets the same number.
If they do not divide, chunks at the ends get one layer fewer, the last chunk first, as embedding and loss are there
too. Llama 3 405B has 126 layers on 16 stages, one fewer on the first and the last (Grattafiori et al., 2024, section
3.3.2). A plan may have Megatron-Core's settings: layers of the first and of the last stage
(``--decoder-first-pipeline-num-layers``, ``--decoder-last-pipeline-num-layers``), embedding or loss as a layer
(``--account-for-embedding-in-pipeline-split``, ``--account-for-loss-in-pipeline-split``). If the loss counts as a
layer, so does each multi-token prediction module: DeepSeek-V3's recipes put both and one layer on the last of 16 chunks
of four ("Et*4|(t*4|)*14tmL", Megatron-Bridge). ``balanced`` is nanotron's rule: each stage takes layers until it has
its share of the parameters of all products, including the head's. Source: ``build_model`` of nanotron's
``models/base.py`` with ``get_block_compute_costs`` of its ``models/llama.py``.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from math import ceil

from tracer.parallel_plan import ParallelPlan, PlanError
from tracer.shape_only.transformer import TransformerShape

Counts = tuple[tuple[tuple[int, ...], ...], ...]
"""Blocks of each kind of ``TransformerShape.kinds``: [stage][chunk][kind]."""


@lru_cache(maxsize=4096)
def layers_of(layers: int, stages: int, chunks: int = 1, first: int | None = None, last: int | None = None,
              embedding: bool = False, loss: int = 0) -> tuple[tuple[int, ...], ...]:
    """Return the number of layers of every chunk of every stage, [stage][chunk].

    Args:
        layers, stages, chunks: layers of the model, stages of the pipeline, chunks of a stage.
        first, last: layers of the first and of the last stage, over all their chunks.
        embedding: whether the embedding counts as a layer of the first chunk.
        loss: number of layers that the last chunk has fewer for its loss and prediction modules.

    Raises:
        PlanError: the layers cannot be spread in this way.
    """
    total = stages * chunks
    if first is None and last is None:
        order = _evenly(layers + embedding + loss, total)
        order[0] -= embedding
        order[-1] -= loss
    else:
        order = _around(layers, stages, chunks, first, last)
    if min(order) < 0 or (not embedding and not loss and min(order) < 1):
        where = f"pp={stages} stages" + (f" of {chunks} chunks" if chunks > 1 else "")
        raise PlanError(f"{layers:,} layers are too few for {where}, each of which needs one; choose fewer stages.")
    return tuple(tuple(order[chunk * stages + stage] for chunk in range(chunks)) for stage in range(stages))


def _evenly(layers: int, places: int) -> list[int]:
    """Return the layers of each place if spread evenly; places at the ends get fewer first."""
    each = -(-layers // places)
    short = each * places - layers
    order = [each] * places
    for lacking in range(short):
        order[-1 - lacking // 2 if lacking % 2 == 0 else lacking // 2] -= 1
    return order


def _around(layers: int, stages: int, chunks: int, first: int | None, last: int | None) -> list[int]:
    """Return the layers of each place if those of the first or the last stage are given."""
    for name, value in (("first_layers", first), ("last_layers", last)):
        if value is not None and value % chunks:
            raise PlanError(f"{name}={value} cannot be split evenly by the stage's {chunks} chunks; choose a multiple.")
    given = (first or 0) + (last or 0)
    between = stages - (first is not None) - (last is not None)
    if given > layers or (between == 0) != (given == layers) or (between and (layers - given) % (between * chunks)):
        said = " and ".join(f"{name}={value}" for name, value in (("first_layers", first), ("last_layers", last))
                            if value is not None)
        raise PlanError(f"With {said}, {max(layers - given, 0):,} of {layers:,} layers are left, which {between} stages"
                        + (f" of {chunks} chunks" if chunks > 1 else "") + " cannot share evenly; choose others.")
    each = (layers - given) // between // chunks if between else 0
    row = [each] * stages
    if first is not None:
        row[0] = first // chunks
    if last is not None:
        row[-1] = last // chunks
    return row * chunks


def spread(plan: ParallelPlan, shape: TransformerShape) -> Counts:
    """Return the number of blocks of each kind (``shape.kinds``) in every chunk of every stage.

    Raises:
        PlanError: the plan cannot spread the layers.
    """
    return _counts(shape, plan.pp, plan.chunks, plan.first_layers, plan.last_layers, plan.embedding_layer,
                   int(plan.loss_layer) * (1 + shape.predictions), plan.balanced)


@lru_cache(maxsize=4096)
def _counts(shape: TransformerShape, stages: int, chunks: int, first: int | None, last: int | None, embedding: bool,
            loss: int, balanced: bool = False) -> Counts:
    rows = layers_of(shape.layers, stages, chunks, first, last, embedding, loss) if not balanced else (
        _balanced(shape, stages))
    if not shape.stack and not shape.predictions:
        return tuple(tuple((count,) for count in row) for row in rows)
    kinds = {kind: row for row, kind in enumerate(shape.kinds)}
    order = [kinds[run.one_layer()] for run in shape.runs for _ in range(run.layers)]
    ends = [0, *accumulate(rows[stage][chunk] for chunk in range(chunks) for stage in range(stages))]

    def of(stage: int, chunk: int) -> tuple[int, ...]:
        place = chunk * stages + stage
        held = order[ends[place]:ends[place + 1]]
        if shape.predictions and place == len(ends) - 2:
            held += [kinds[shape.prediction]] * shape.predictions
        return tuple(held.count(kind) for kind in range(len(kinds)))

    return tuple(tuple(of(stage, chunk) for chunk in range(chunks)) for stage in range(stages))


def _balanced(shape: TransformerShape, stages: int) -> tuple[tuple[int, ...], ...]:
    """Return the layers of each stage, [stage][0]. A stage takes layers until all stages so far have their share of the
    parameters. Every stage gets at least one layer, except the last, which has the head."""
    if shape.layers < stages - 1:
        raise PlanError(f"{shape.layers:,} layers are too few for pp={stages} stages, of which all but the last need "
                        "one; choose fewer stages.")
    head = shape.vocab * shape.hidden / shape.one_layer().block_parameters()
    share = (shape.layers + head) / stages
    ends = [0]
    for stage in range(1, stages):
        left = stages - 1 - stage  # stages between this one and the last
        ends.append(max(ends[-1] + 1, min(ceil(stage * share - 1e-3), shape.layers - left)))
    return tuple((end - begin,) for begin, end in zip(ends, [*ends[1:], shape.layers], strict=True))


def recomputed(plan: ParallelPlan, shape: TransformerShape) -> Counts:
    """Return the number of recomputed blocks of each kind in every chunk of every stage: all, or the chunk's first
    ``recompute_layers``."""
    counts = spread(plan, shape)
    if not plan.recompute.blocks:
        return tuple(tuple((0,) * len(kinds) for kinds in row) for row in counts)
    if plan.recompute_layers is None:
        return counts
    return tuple(tuple(_first(kinds, plan.recompute_layers) for kinds in row) for row in counts)


def _first(kinds: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return a chunk's first ``layers`` blocks by kind, if kinds follow one another."""
    taken = []
    for count in kinds:
        taken.append(min(count, layers))
        layers -= taken[-1]
    return tuple(taken)


def counts_of_stage(plan: ParallelPlan, shape: TransformerShape, stage: int) -> list[tuple[int, int]]:
    """Return for each of ``shape.kinds`` a stage's number of blocks, and how many of them backward computes again."""
    columns = zip(*spread(plan, shape)[stage], strict=True), zip(*recomputed(plan, shape)[stage], strict=True)
    return [(sum(held), sum(rerun)) for held, rerun in zip(*columns, strict=True)]


def blocks_of_stage(plan: ParallelPlan, shape: TransformerShape, stage: int) -> list[tuple[TransformerShape, int, int]]:
    """Return a stage's kinds of blocks: each as a decoder of one block, with its number, and the number that backward
    computes again.

    Raises:
        PlanError: the plan cannot spread the layers.
    """
    return [(kind, *counts) for kind, counts in zip(shape.kinds, counts_of_stage(plan, shape, stage), strict=True)
            if counts[0]]
