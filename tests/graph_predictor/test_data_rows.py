"""Rows that data select follow the tokens: experts by masks, by sorted pieces, by capacity."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from micro import Micro
from torch import Tensor, nn
from torch.nn import functional as F

import tracer
from graph_predictor.sizes.data_rows import Selection, said_of, selections, share_of, spread_of
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from graph_predictor.sizes.scaling import unrolled_size
from tracer.graph import ExecutionGraph
from tracer.views import arguments

EXPERTS, WIDTH, INNER = 5, 12, 40
TOKENS = 6 * 14
Op = tuple[str, list[object], list[object]]


def recorded(folder: Path, *ops: Op) -> ExecutionGraph:
    """A step of 6 texts of 14 words, with a router of 5 experts, and these operations."""
    first: list[Op] = [("aten::embedding", [[100, WIDTH], [6, 14]], []),
                       ("aten::linear", [[6, 14, WIDTH], [EXPERTS, WIDTH], [EXPERTS]], []),
                       ("aten::view", [[6, 14, WIDTH]], [[TOKENS, WIDTH]]), ("aten::relu", [[TOKENS, 2]], [])]
    trace = Micro().calibrate()
    trace.step(1000, 3000, 1)
    for number, (name, tensors, numbers) in enumerate([*first, *ops]):
        trace.op(name, 1010 + 10 * number, 1015 + 10 * number, **{
            "Input Dims": [*tensors, *([] for _ in numbers)],
            "Input type": [*(["float"] * len(tensors)), *(["ScalarList"] * len(numbers))],
            "Concrete Inputs": [*("" for _ in tensors), *map(str, numbers)]})
    return trace.read(folder)


def masks(rows: int) -> list[Op]:
    return [("aten::nonzero", [[2, TOKENS]], []), ("aten::unbind", [[rows, 2]], [1])]


def layer(rows: int) -> Op:
    return ("aten::linear", [[rows, WIDTH], [INNER, WIDTH], [INNER]], [])


def rows_of(scaled: ScaledShapes) -> list[int]:
    """Rows of the experts' layers at the new size."""
    graph = scaled.graph
    found = [scaled.operation_of(row).arguments for row in range(len(graph.ops))
             if graph.string(int(graph.ops.name[row])) == "aten::linear"]
    return [one[0].shape[0] for one in found if one[1].shape == (INNER, WIDTH)]  # type: ignore[index]


def test_rows_of_masks_follow_the_tokens(tmp_path: Path) -> None:
    graph = recorded(tmp_path, *masks(31), layer(31), *masks(57), layer(57))
    assert [one[:2] for one in selections(graph, {6})] == [(31, (2, TOKENS)), (57, (2, TOKENS))]
    assert rows_of(ScaledShapes(graph, (("batch", 6, 15),))) == [78, 143]


@pytest.mark.parametrize("sliced", [False, True])
def test_pieces_of_unequal_length_are_experts(tmp_path: Path, sliced: bool) -> None:
    lengths = [39, 29, 31, 48, 21]  # each token twice
    starts = [sum(lengths[:at]) for at in range(len(lengths))]
    cut: list[Op] = ([("aten::slice", [[2 * TOKENS, WIDTH]], [0, start, start + length, 1])
                      for start, length in zip(starts, lengths, strict=True)] if sliced else
                     [("aten::split_with_sizes", [[2 * TOKENS, WIDTH]], [lengths, 0])])
    graph = recorded(tmp_path, *cut, *map(layer, lengths))
    scaled = ScaledShapes(graph, (("batch", 6, 18),))
    assert rows_of(scaled) == [3 * length for length in lengths]
    assert unrolled_size(scaled) is None


def test_pieces_of_a_loop_and_of_samples_are_none_of_experts(tmp_path: Path) -> None:
    def split(lengths: list[int]) -> list[Selection]:
        return selections(recorded(tmp_path, ("aten::split_with_sizes", [[sum(lengths), WIDTH]], [lengths, 0])), {6})

    assert not split([20, 20, 20, 8]) and not split([9, 15, 12, 11, 10, 20])
    assert len(split([9, 15, 12, 11, 21])) == 5


def test_experts_of_a_capacity_take_a_share_of_the_tokens() -> None:
    """And the best of some classes stay as many."""
    def traced(batch: int) -> ExecutionGraph:
        def build() -> Callable[[], None]:
            router, up = nn.Linear(WIDTH, EXPERTS), nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER))
            embed = nn.Embedding(100, WIDTH)
            optimizer = torch.optim.SGD([*router.parameters(), *embed.parameters(), up], lr=0.1)

            def step() -> None:
                x: Tensor = embed(torch.randint(100, (batch, 14))).flatten(0, 1)
                weight, places = router(x).softmax(-1).t().topk(2 * len(x) // EXPERTS, -1)
                (F.silu(torch.bmm(x[places], up)) * weight[..., None]).sum().backward()
                optimizer.step()
            return step
        return tracer.trace_step(build, device="cpu")

    before, truth = traced(10), traced(30)
    scaled = ScaledShapes(before, (("batch", 10, 30),))
    for row in range(len(truth.ops)):
        if truth.string(int(truth.ops.name[row])) in ("aten::bmm", "aten::silu_backward", "aten::topk"):
            assert [one.shape for one in scaled.operation_of(row).arguments] == [
                one.shape for one in arguments(truth, row)]


def test_rows_that_differ_from_step_to_step_widen_the_interval() -> None:
    shared_out = [Selection(30, (90,), 1), Selection(60, (90,), 1), Selection(45, (90,), 2), Selection(45, (90,), 2)]
    assert spread_of(shared_out) == 0.0 == spread_of([])
    assert spread_of([Selection(30, (90,), 1), Selection(60, (90,), 2)]) == pytest.approx(0.628, abs=0.001)
    assert "(33.3% to 66.7% of what they are selected from)" in said_of(shared_out, 0.4)


def test_the_share_of_recorded_masks_is_that_of_all(tmp_path: Path) -> None:
    assert share_of(recorded(tmp_path, *masks(31), *masks(53))) == pytest.approx(84 / (4 * TOKENS))
    assert share_of(recorded(tmp_path, ("aten::split_with_sizes", [[60, WIDTH]], [[9, 30, 21], 0]))) is None
