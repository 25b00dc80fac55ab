"""What each dimension communicates, held to what PyTorch's DDP, FSDP2, DTensor and pipelines call in a fake world."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

pytest.importorskip("torch")

from graph_predictor.comm.recorded_calls import table_calls
from graph_predictor.comm.traffic import Communication, of_block, of_boundary
from kernel_models.collectives import CollectiveKind
from planner.parallel.decoder import decoder_of
from tracer import workloads
from tracer.shape_only import trace_workload

SIZES = {"batch": 4, "seq": 16}
KINDS = CollectiveKind


@cache
def noted(workload: str, plan: str, world: int, depth: int) -> Counter[KINDS]:
    """Payload by kind of what rank 0 of a traced step called."""
    settings = workloads.configure(workload, preset="tiny", depth=depth, **SIZES)
    graph = trace_workload(settings, "cpu", world_size=world, parallel=plan, warmup=0)
    found: Counter[KINDS] = Counter()
    for call in table_calls(graph, None):
        assert call is not None
        found[call.kind] += round(call.payload_bytes)
    return found


def of_a_block(workload: str, plan: str, world: int) -> dict[KINDS, int]:
    """What one block more calls."""
    more, fewer = (noted(workload, plan, world, depth) for depth in (2, 1))
    return {kind: size for kind in more if (size := more[kind] - fewer[kind])}


def listed(rows: list[Communication], dimension: str, kind: KINDS) -> float:
    return sum(row.count * row.payload_bytes for row in rows if (row.dimension, row.kind) == (dimension, kind))


def test_stages() -> None:
    shape = decoder_of("llama", workloads.as_plain(workloads.configure("llama", preset="tiny", **SIZES)))
    stream = float(SIZES["batch"] * SIZES["seq"] * shape.hidden * 4)
    rows = of_boundary(stream, 1, sequence_parallel=False)
    # The first of two stages sends each of two micro-batches of half the batch, and receives their gradients.
    assert noted("llama", "pp=2", 2, 2)[KINDS.SEND_RECV] == listed(rows, "pp", KINDS.SEND_RECV)


def test_experts() -> None:
    settings = workloads.configure("moe", preset="tiny", **SIZES)
    stream = SIZES["batch"] * SIZES["seq"] * settings.width * 4
    # Experts of the suite have places for more than an even share, which are sent whether taken or not.
    rows = of_block(stream, sequence_parallel=False, routed=settings.capacity * settings.top_k * stream)
    calls = of_a_block("moe", "ddp=2,ep=2", 2)
    assert calls[KINDS.ALL_TO_ALL] == pytest.approx(listed(rows, "ep", KINDS.ALL_TO_ALL))
