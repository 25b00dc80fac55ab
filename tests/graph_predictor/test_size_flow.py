"""Dimensions of one size by coincidence, told apart by what the step does with them (``sizes/size_flow.py``).

Each program is traced by shapes at two sizes; the first scaled to the second has the second's shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tracer
from graph_predictor.prediction.scenario import EditError
from graph_predictor.sizes.layout_rules import Call, Inconsistent, rule_of
from graph_predictor.sizes.layout_rules import Tensor as Recorded
from graph_predictor.sizes.layouts import NamedSizes
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from kernel_models.operation import Operation, is_free
from tracer.graph import ExecutionGraph
from tracer.views import Argument


class Relative(nn.Module):
    """Attention over 16 words of which 4 samples × 16 are as many as features, and 4 samples × 4 heads as words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(90, 64), nn.Embedding(40, 4)
        self.qkv = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.inner, self.out = nn.Linear(64, 200, bias=False), nn.Linear(200, 64, bias=False)

    def forward(self, samples: int) -> Tensor:
        x = self.words(torch.randint(90, (samples, 16)))
        q, k, v = (layer(x).view(samples, 16, 4, 16).transpose(1, 2) for layer in self.qkv)
        at = torch.arange(16)
        bias = self.places(at[None, :] - at[:, None] + 16).permute(2, 0, 1)[None]
        x = x + ((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).reshape(samples, 16, 64)
        return x + self.out(self.inner(x).relu())


class Nearest(nn.Module):
    """A layer over each point and its 10 nearest ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 24)

    def forward(self, points: int) -> Tensor:
        x = torch.randn(4, points, 3)
        near = torch.cdist(x, x).topk(10, largest=False).indices
        rows = x.gather(1, near.flatten(1)[:, :, None].expand(-1, -1, 3)).unflatten(1, near.shape[1:])
        return self.layer(rows - x[:, :, None]).relu().amax(2)


class Placed(nn.Module):
    """Frames, halved by a stride, each of which has a row of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.halve, self.table = nn.Conv1d(8, 24, 3, 2, 1), nn.Embedding(60, 24)

    def forward(self, frames: int) -> Tensor:
        return self.halve(torch.randn(4, 8, frames)).mT + self.table(torch.arange(60))


def step(make: Callable[[], nn.Module], size: int) -> ExecutionGraph:
    def build() -> Callable[[], Any]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> None:
            model(size).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return run
    return tracer.trace_step(build, device="cpu")


def shapes(operation: Operation) -> tuple[object, ...]:
    return operation.name, *(one.shape for one in operation.arguments if one.shape)


@pytest.mark.parametrize(("make", "name", "old", "new"), [(Relative, "batch", 4, 8), (Nearest, "points", 60, 90)])
def test_each_operation_has_the_shapes_that_it_has_at_the_new_size(make: Callable[[], nn.Module], name: str, old: int,
                                                                   new: int) -> None:
    before, truth = step(make, old), step(make, new)
    scaled = ScaledShapes(before, ((name, old, new),))
    scaled.check()
    assert len(before.ops) == len(truth.ops)
    rows = [row for row in range(len(truth.ops)) if not is_free(truth.string(int(truth.ops.name[row])))]
    found = [shapes(scaled.operation_of(row)) for row in rows]
    assert found == [shapes(Operation.from_graph(truth, row)) for row in rows]


def test_a_table_with_a_row_for_each_frame_grows_with_them() -> None:
    with pytest.raises(EditError, match="changes parameters of the model: one of 60×24"):
        ScaledShapes(step(Placed, 120), (("frames", 120, 180),)).check()


def test_a_dimension_of_one_that_is_put_in_follows_nothing() -> None:
    """``unsqueeze`` is written as strides, as the windows of a short-time Fourier transform are."""
    sizes = NamedSizes((120,), (180,), (False,))
    sound = Recorded((3, 40, 120), (sizes.constant, sizes.constant, sizes.following(0)))
    arguments = tuple(Argument("float", None, None, value) for value in ("", "[3, 40, 1, 120]", "[4800, 120, 120, 1]"))
    assert rule_of("aten::as_strided")(Call(sizes, (sound,), arguments, sizes.constants)).results == ()


def test_keys_and_values_are_as_long_as_each_other() -> None:
    sizes = NamedSizes((16,), (24,), (False,))
    row = sizes.constant, sizes.constant, sizes.constant, sizes.constant
    long = sizes.constant, sizes.constant, sizes.following(0), sizes.constant
    query, key, value = (Recorded((4, 2, 16, 16), one) for one in (row, long, long))
    attention = rule_of("aten::_scaled_dot_product_flash_attention_for_cpu")
    results = attention(Call(sizes, (query, key, value), (), sizes.constants)).results
    assert [sizes.shape(one.shape, one.layout) for one in results] == [(4, 2, 16, 16), (4, 2, 16)]
    with pytest.raises(Inconsistent):
        attention(Call(sizes, (query, key, query), (), sizes.constants))
