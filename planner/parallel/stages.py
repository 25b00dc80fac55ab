"""The blocks of each pipeline stage: how a decoder's layers are spread over stages and their chunks.

Layers come in order: chunk 0 of every stage, then chunk 1 of every stage. By default each chunk gets the same number.
Where they do not divide, chunks at the ends get one less, the last first, as embedding and loss are there too. Llama 3
405B has 126 layers on 16 stages, the first and the last with one less (Grattafiori et al., 2024, section 3.3.2). A plan
may have the settings of Megatron-Core's arguments: layers of the first and of the last stage
(``--decoder-first-pipeline-num-layers``, ``--decoder-last-pipeline-num-layers``), embedding or loss as a layer
(``--account-for-embedding-in-pipeline-split``, ``--account-for-loss-in-pipeline-split``). Where the loss counts, each
multi-token prediction module does: DeepSeek-V3's recipes put both and one layer on the last of 16 chunks of four
("Et*4|(t*4|)*14tmL", Megatron-Bridge). ``balanced`` is nanotron's: each stage goes on until it has its share of the
parameters of all products, the head's among them. Source: ``build_model`` of nanotron's ``models/base.py`` with
``get_block_compute_costs`` of its ``models/llama.py``.
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
    """Return how many layers every chunk of every stage has, [stage][chunk].

    Args:
        layers, stages, chunks: of the model, of the pipeline, of a stage.
        first, last: layers of the first and of the last stage, all their chunks together.
        embedding: counted as a layer of the first chunk; loss: layers that the last one has less for its loss and for
            prediction modules.

    Raises:
        PlanError: they cannot be spread so.
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
    """Layers of each place; those at the ends are the first to have one less."""
    each = -(-layers // places)
    short = each * places - layers
    order = [each] * places
    for lacking in range(short):
        order[-1 - lacking // 2 if lacking % 2 == 0 else lacking // 2] -= 1
    return order


def _around(layers: int, stages: int, chunks: int, first: int | None, last: int | None) -> list[int]:
    """Layers of each place where those of the first or the last stage are given."""
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
    """Return how many blocks of each kind (``shape.kinds``) every chunk of every stage has.

    Raises:
        PlanError: the layers cannot be spread as the plan wants it.
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
    """Return the layers of each stage, [stage][0]: a stage takes layers until all so far have its share of the
    parameters. Every stage but the last, which has the head, gets one at least."""
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
    """Return how many blocks of each kind every chunk of every stage computes again in backward: all, or the chunk's
    first ``recompute_layers``."""
    counts = spread(plan, shape)
    if not plan.recompute.blocks:
        return tuple(tuple((0,) * len(kinds) for kinds in row) for row in counts)
    if plan.recompute_layers is None:
        return counts
    return tuple(tuple(_first(kinds, plan.recompute_layers) for kinds in row) for row in counts)


def _first(kinds: tuple[int, ...], layers: int) -> tuple[int, ...]:
    """Return the first ``layers`` of a chunk's blocks, kinds taken to follow one another."""
    taken = []
    for count in kinds:
        taken.append(min(count, layers))
        layers -= taken[-1]
    return tuple(taken)


def counts_of_stage(plan: ParallelPlan, shape: TransformerShape, stage: int) -> list[tuple[int, int]]:
    """Return a stage's blocks of each of ``shape.kinds``, and those of them that backward computes again."""
    columns = zip(*spread(plan, shape)[stage], strict=True), zip(*recomputed(plan, shape)[stage], strict=True)
    return [(sum(held), sum(rerun)) for held, rerun in zip(*columns, strict=True)]


def blocks_of_stage(plan: ParallelPlan, shape: TransformerShape, stage: int) -> list[tuple[TransformerShape, int, int]]:
    """Return the kinds of blocks that a stage has, each as a decoder of one block, how many there are of each, and how
    many of them backward computes again.

    Raises:
        PlanError: the layers cannot be spread as the plan wants it.
    """
    return [(kind, *counts) for kind, counts in zip(shape.kinds, counts_of_stage(plan, shape, stage), strict=True)
            if counts[0]]
