"""What each dimension communicates, held to what PyTorch's DDP, FSDP2, DTensor and pipelines call in a fake world."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

pytest.importorskip("torch")

from graph_predictor.comm.recorded_calls import table_calls
from graph_predictor.comm.traffic import Communication, Pass, of_block, of_boundary, of_replicas
from kernel_models.collectives import CollectiveKind
from planner.parallel.decoder import decoder_of
from tracer import workloads
from tracer.parallel_plan import Sharding
from tracer.shape_only import trace_workload

SIZES = {"batch": 4, "seq": 16}
KINDS = CollectiveKind


@cache
def noted(workload: str, plan: str, world: int, depth: int, accumulation: int = 1) -> Counter[KINDS]:
    """Payload by kind of what rank 0 of a traced step called."""
    settings = workloads.configure(workload, preset="tiny", depth=depth, accumulation=accumulation, **SIZES)
    graph = trace_workload(settings, "cpu", world_size=world, parallel=plan, warmup=0)
    found: Counter[KINDS] = Counter()
    for call in table_calls(graph, None):
        assert call is not None
        found[call.kind] += round(call.payload_bytes)
    return found


def of_a_block(workload: str, plan: str, world: int, accumulation: int = 1) -> dict[KINDS, int]:
    """What one block more calls."""
    more, fewer = (noted(workload, plan, world, depth, accumulation) for depth in (2, 1))
    return {kind: size for kind in more if (size := more[kind] - fewer[kind])}


def listed(rows: list[Communication], dimension: str, passes: int = 1) -> dict[KINDS, float]:
    found: dict[KINDS, float] = {}
    for row in rows:
        if row.dimension == dimension:
            times = 1 if row.during is Pass.STEP else passes
            found[row.kind] = found.get(row.kind, 0.0) + times * row.count * row.payload_bytes
    return found


def decoder(workload: str = "llama") -> tuple[int, float]:
    """Bytes of a block's parameters, and of its residual stream."""
    settings = workloads.configure(workload, preset="tiny", **SIZES)
    shape = decoder_of(workload, workloads.as_plain(settings))
    return shape.block_parameters(1) * 4, float(SIZES["batch"] * SIZES["seq"] * shape.hidden * 4)


@pytest.mark.slow  # planner/test_comm_study.py, whose plans are made of these rows: a_plan_communicates[fsdp2=2,tp=2]
def test_tensor_parallel_blocks() -> None:
    _, stream = decoder()
    rows = of_block(stream, sequence_parallel=False)
    assert of_a_block("llama", "tp=2", 2) == listed(rows, "tp")


@pytest.mark.slow  # plans that communicate as their fake worlds do: test_comm_study.py
@pytest.mark.parametrize(("plan", "sharding", "accumulation"), [
    ("ddp=2", Sharding.NONE, 1), ("fsdp2=2", Sharding.PARAMETERS, 2)])
def test_replicas(plan: str, sharding: Sharding, accumulation: int) -> None:
    parameters, _ = decoder()
    rows = of_replicas(sharding, parameters, parameters)
    expected = listed(rows, "dpcp", accumulation)
    if sharding is Sharding.PARAMETERS:
        # The suite reduces with the last micro-batch only (no_sync), and so keeps whole gradients until then.
        expected[KINDS.REDUCE_SCATTER] /= accumulation
    assert of_a_block("llama", plan, 2, accumulation) == pytest.approx(expected)


def test_stages() -> None:
    _, stream = decoder()
    rows = listed(of_boundary(stream, 1, sequence_parallel=False), "pp")
    # The first of two stages sends each of two micro-batches of half the batch, and receives their gradients.
    assert noted("llama", "pp=2", 2, 2)[KINDS.SEND_RECV] == rows[KINDS.SEND_RECV]


def test_experts() -> None:
    settings = workloads.configure("moe", preset="tiny", **SIZES)
    stream = SIZES["batch"] * SIZES["seq"] * settings.width * 4
    # Experts of the suite have places for more than an even share, which are sent whether taken or not.
    rows = of_block(stream, sequence_parallel=False, routed=settings.capacity * settings.top_k * stream)
    calls = of_a_block("moe", "ddp=2,ep=2", 2)
    assert calls[KINDS.ALL_TO_ALL] == pytest.approx(listed(rows, "ep")[KINDS.ALL_TO_ALL])
