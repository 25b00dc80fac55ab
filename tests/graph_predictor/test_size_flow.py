"""Dimensions of one size by coincidence, told apart by what the step does with them (``sizes/size_flow.py``), and sizes
that only follow another: what strides, pooling, padding and windows leave of it.

Each program is traced by shapes at two sizes; the first scaled to the second has the second's shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tracer
from graph_predictor.prediction.scenario import EditError
from graph_predictor.sizes.layouts import Dim, NamedSizes, reshaped
from graph_predictor.sizes.scaled_shapes import ScaledShapes
from kernel_models.operation import Operation, is_free
from tracer.graph import ExecutionGraph


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

    def forward(self, frames: Tensor) -> Tensor:
        return self.halve(frames).mT + self.table(torch.arange(60))


def step(make: Callable[[], nn.Module], data: object) -> ExecutionGraph:
    def build() -> Callable[[], Any]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> None:
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return run
    return tracer.trace_step(build, device="cpu")


def scaled_and_true(make: Callable[[], nn.Module], name: str, old: int, new: int,
                    data: Callable[[int], object] = int) -> Iterator[tuple[Operation, Operation]]:
    """Each operation of a step scaled to another size, and that of a trace there."""
    before, truth = step(make, data(old)), step(make, data(new))
    scaled = ScaledShapes(before, ((name, old, new),))
    scaled.check()
    assert len(before.ops) == len(truth.ops)
    for row in range(len(truth.ops)):
        yield scaled.operation_of(row), Operation.from_graph(truth, row)


def shapes(operation: Operation) -> tuple[object, ...]:
    return operation.name, *(one.shape for one in operation.arguments if one.shape)


@pytest.mark.parametrize(("make", "name", "old", "new"), [(Relative, "batch", 4, 8), (Nearest, "points", 60, 90)])
def test_each_operation_has_the_shapes_that_it_has_at_the_new_size(make: Callable[[], nn.Module], name: str, old: int,
                                                                   new: int) -> None:
    for mine, true in scaled_and_true(make, name, old, new):
        assert is_free(true.name) or shapes(mine) == shapes(true)


MOST_OFF = 0.03
"""Share of all elements by which rounding at every stride may be off."""


def sound() -> nn.Module:
    return nn.Sequential(nn.Conv1d(1, 12, 10, 5), nn.GELU(), nn.Conv1d(12, 20, 3, 2), nn.MaxPool1d(2), Tokens(20))


def images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 12, 7, 2, 3), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(3, 2, 1),
                         nn.Conv2d(12, 18, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(18, 7))


def maps() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.AvgPool2d(2), nn.Conv2d(12, 14, 3, padding=1),
                         nn.Upsample(scale_factor=2), nn.ConvTranspose2d(14, 3, 4, 2, 1))


def patches() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 20, 8, 8), nn.Flatten(2), Tokens(20))


def causal() -> nn.Module:
    return nn.Sequential(nn.ConstantPad1d((4, 0), 0.0), nn.Conv1d(1, 9, 3, dilation=2), nn.ReLU())


class Tokens(nn.Module):
    """A layer over [samples, width, tokens]."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x.transpose(1, 2))).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v)).mean(1)


class Windows(nn.Module):
    """Overlapping parts of a sequence."""

    def __init__(self, frames: bool) -> None:
        super().__init__()
        self.inner, self.frames = nn.Linear(33 if frames else 64, 11), frames

    def forward(self, x: Tensor) -> Tensor:
        if self.frames:
            parts = torch.stft(x[:, 0], 64, 32, window=torch.hann_window(64), return_complex=True).abs().mT
        else:
            parts = x[:, 0].unfold(1, 64, 16)
        return self.inner(parts).mean(1)


class Whole(nn.Module):
    """A layer over all of a map, and places of patches: parameters as large as the image makes them."""

    def __init__(self, places: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 15, 8, 8)
        self.places = nn.Parameter(torch.zeros(1, 36, 15)) if places else None
        self.head = nn.Linear(15 if places else 540, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.places is not None:
            return self.head(self.conv(x).flatten(2).transpose(1, 2) + self.places).mean(1)
        return self.head(F.relu(self.conv(x)).flatten(1))


def elements(operation: Operation) -> list[int]:
    return [math.prod(one.shape) for one in operation.arguments
            if one.shape and all(isinstance(size, int) for size in one.shape)]


@pytest.mark.parametrize(("make", "dimensions", "old", "new"), [
    (sound, 1, 2000, 6000), (sound, 1, 2000, 900), (images, 2, 48, 112), (maps, 2, 44, 88), (patches, 2, 48, 80),
    (causal, 1, 90, 250), (lambda: Windows(False), 1, 400, 1200), (lambda: Windows(True), 1, 1600, 4800)])
def test_what_follows_a_size_is_scaled_with_it(make: Callable[[], nn.Module], dimensions: int, old: int,
                                               new: int) -> None:
    off = total = 0
    for mine, true in scaled_and_true(make, "size", old, new, lambda size: torch.randn(5, 1, *(size,) * dimensions)):
        off += sum(abs(a - b) for a, b in zip(elements(mine), elements(true), strict=True))
        total += sum(elements(true))
    assert off <= MOST_OFF * total


@pytest.mark.parametrize(("places", "said"), [(True, "1×36×15"), (False, "540×3")])
def test_a_size_that_parameters_follow_is_refused(places: bool, said: str) -> None:
    with pytest.raises(EditError, match=f"changes parameters of the model: one of {said}"):
        ScaledShapes(step(lambda: Whole(places), torch.randn(5, 1, 48, 48)), (("image", 48, 96),)).check()
    with pytest.raises(EditError, match="changes parameters of the model: one of 60×24"):
        ScaledShapes(step(Placed, torch.randn(4, 8, 120)), (("frames", 120, 180),)).check()


def test_a_share_of_a_dimension_keeps_what_it_follows_through_views() -> None:
    sizes = NamedSizes((2000,), (4000,), (False,), {399: Dim((1,), -1, True)})
    found = reshaped(sizes, (399, 4), (Dim((1,), -1, True), Dim((0,))), (1596,))
    assert found is not None and sizes.shape((1596,), found) == (3196,)
    again = reshaped(sizes, (1596,), found, (399, 4))
    assert again is not None and sizes.shape((399, 4), again) == (799, 4)
    square = reshaped(sizes, (4, 4), (Dim((1,), -3, True),) * 2, (16,))
    assert square is not None and sizes.shape((16,), square) == (121,)
