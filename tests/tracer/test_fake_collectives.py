"""Every collective of torch.distributed, in a fake world and traced by shapes alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import tracer
from tracer.fake_world import fake_world
from tracer.shape_only import trace_workload
from tracer.workloads import configure

RANKS = 4
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.filterwarnings("ignore::UserWarning")]


def ones(count: int = 8) -> Any:
    return torch.ones(count)


def some(count: int = 8) -> list[Any]:
    return [ones(count) for _ in range(RANKS)]


def sparse() -> Any:
    return torch.sparse_coo_tensor(torch.zeros(1, 3, dtype=torch.long), torch.ones(3, 4), (10, 4))


def together(call: Callable[[], object]) -> None:
    with dist._coalescing_manager(async_ops=True) as manager:
        call()
        call()
    manager.wait()


def world() -> Any:
    return dist.group.WORLD


CALLS: dict[str, tuple[Callable[[], Any], list[tuple[str, int, int]]]] = {
    "all_reduce": (lambda: dist.all_reduce(ones()), [("all_reduce", 8, 8)]),
    "all_reduce of sparse": (lambda: dist.all_reduce(sparse()), [("all_reduce", 12 + 6, 12 + 6)]),
    "all_reduce, coalesced": (lambda: dist.all_reduce_coalesced([ones(), ones()]), [("all_reduce", 16, 16)]),
    "broadcast": (lambda: dist.broadcast(ones(), 0), [("broadcast", 8, 8)]),
    "reduce": (lambda: dist.reduce(ones(), 0), [("reduce", 8, 8)]),
    "all_gather": (lambda: dist.all_gather(some(), ones()), [("all_gather", 8, 32)]),
    "all_gather into": (lambda: dist.all_gather_into_tensor(ones(32), ones()), [("all_gather", 8, 32)]),
    "all_gather, coalesced": (lambda: dist.all_gather_coalesced([[each] for each in some()], [ones()]),
                              [("all_gather", 8, 32)]),
    "gather": (lambda: dist.gather(ones(), some(), 0), [("all_gather", 8, 32)]),
    "scatter": (lambda: dist.scatter(ones(), some(), 0), [("unknown", 32, 8)]),
    "reduce_scatter": (lambda: dist.reduce_scatter(ones(), some()), [("reduce_scatter", 32, 8)]),
    "reduce_scatter of one": (lambda: dist.reduce_scatter_tensor(ones(2), ones()), [("reduce_scatter", 8, 2)]),
    "all_to_all of one": (lambda: dist.all_to_all_single(ones(), ones()), [("all_to_all", 8, 8)]),
    "all_to_all": (lambda: dist.all_to_all(some(), some()), [("all_to_all", 32, 32)]),
    "send": (lambda: dist.send(ones(), 1), [("send", 8, 8)]),
    "recv": (lambda: dist.recv(ones(), 1), [("recv", 8, 8)]),
    "barrier": (lambda: dist.barrier(), [("barrier", 1, 1)]),
    "all_reduces together": (lambda: together(lambda: dist.all_reduce(ones())), [("all_reduce", 16, 16)]),
    "gathers together": (lambda: together(lambda: dist.all_gather_into_tensor(ones(32), ones())),
                         [("all_gather", 16, 64)]),
    "reduce_scatters together": (lambda: together(lambda: dist.reduce_scatter_tensor(ones(2), ones())),
                                 [("reduce_scatter", 16, 4)]),
    "functional all_reduce": (lambda: functional.all_reduce(ones(), "sum", world()) + 1, [("all_reduce", 8, 8)]),
    "functional all_gather": (lambda: functional.all_gather_tensor(ones(), 0, world()) + 1, [("all_gather", 8, 32)]),
    "functional reduce_scatter": (lambda: functional.reduce_scatter_tensor(ones(), "sum", 0, world()) + 1,
                                  [("reduce_scatter", 8, 2)]),
    "functional all_to_all": (lambda: functional.all_to_all_single(ones(), None, None, world()) + 1,
                              [("all_to_all", 8, 8)]),
    "functional broadcast": (lambda: functional.broadcast(ones(), 0, world()) + 1, [("broadcast", 8, 8)]),
    "functional all_reduce, coalesced": (
        lambda: functional.all_reduce_coalesced([ones(), ones()], "sum", world())[0] + 1, [("all_reduce", 16, 16)]),
    "functional all_gather, coalesced": (
        lambda: functional.all_gather_into_tensor_coalesced([ones()], world())[0] + 1, [("all_gather", 8, 32)]),
    "functional reduce_scatter, coalesced": (
        lambda: functional.reduce_scatter_tensor_coalesced([ones()], "sum", [0], world())[0] + 1,
        [("reduce_scatter", 8, 2)]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_collective_runs_with_real_tensors_and_with_none(name: str) -> None:
    call, expected = CALLS[name]
    with fake_world(RANKS):
        call()
    graph = tracer.trace_step(lambda: lambda: call(), device="h100-sxm", world_size=RANKS)
    table = graph.collectives
    assert [(graph.string(int(kind)), int(sent), int(received)) for kind, sent, received in zip(
        table.kind, table.elements_in, table.elements_out, strict=True)] == expected


def test_sparse_gradients_are_reduced_by_their_rows() -> None:
    """Each of DLRM's tables: as many rows as it was asked for, and their indices (8 bytes, two elements)."""
    settings = configure("dlrm", preset="tiny", sparse=True, optimizer="sgd")
    graph = trace_workload(settings, world_size=2, parallel="ddp")
    table = graph.collectives
    reduced = [int(sent) for kind, sent in zip(table.kind, table.elements_in, strict=True)
               if graph.string(int(kind)) == "all_reduce"]
    rows = settings.batch * settings.pooling
    assert reduced.count(rows * settings.embedding + 2 * rows) == settings.tables
