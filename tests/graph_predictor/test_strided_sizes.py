"""Sizes that only follow another: what strides, pooling, padding and windows leave of it is scaled with it, or refused.

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
from kernel_models.operation import Operation
from tracer.graph import ExecutionGraph

Model = Callable[[Tensor], Tensor]
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


def step(make: Callable[[], nn.Module], size: tuple[int, ...]) -> ExecutionGraph:
    def build() -> Callable[[], Any]:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def run() -> None:
            model(torch.randn(5, 1, *size)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return run
    return tracer.trace_step(build, device="cpu")


def elements(operation: Operation) -> Iterator[int]:
    for argument in operation.arguments:
        if argument.shape and all(isinstance(one, int) for one in argument.shape):
            yield math.prod(argument.shape)


@pytest.mark.parametrize(("make", "dimensions", "old", "new"), [
    (sound, 1, 2000, 6000), (sound, 1, 2000, 900), (images, 2, 48, 112), (maps, 2, 44, 88), (patches, 2, 48, 80),
    (causal, 1, 90, 250), (lambda: Windows(False), 1, 400, 1200), (lambda: Windows(True), 1, 1600, 4800)])
def test_what_follows_a_size_is_scaled_with_it(make: Callable[[], nn.Module], dimensions: int, old: int,
                                               new: int) -> None:
    before, truth = step(make, (old,) * dimensions), step(make, (new,) * dimensions)
    scaled = ScaledShapes(before, (("size", old, new),))
    scaled.check()
    assert len(before.ops) == len(truth.ops)
    off = total = 0
    for row in range(len(truth.ops)):
        mine, true = elements(scaled.operation_of(row)), list(elements(Operation.from_graph(truth, row)))
        off += sum(abs(a - b) for a, b in zip(mine, true, strict=True))
        total += sum(true)
    assert off <= MOST_OFF * total


@pytest.mark.parametrize(("places", "said"), [(True, "1×36×15"), (False, "540×3")])
def test_a_size_that_parameters_follow_is_refused(places: bool, said: str) -> None:
    with pytest.raises(EditError, match=f"changes parameters of the model: one of {said}"):
        ScaledShapes(step(lambda: Whole(places), (48, 48)), (("image", 48, 96),)).check()


def test_a_share_of_a_dimension_keeps_what_it_follows_through_views() -> None:
    sizes = NamedSizes((2000,), (4000,), (False,), {399: Dim((1,), -1, True)})
    found = reshaped(sizes, (399, 4), (Dim((1,), -1, True), Dim((0,))), (1596,))
    assert found is not None and sizes.shape((1596,), found) == (3196,)
    again = reshaped(sizes, (1596,), found, (399, 4))
    assert again is not None and sizes.shape((399, 4), again) == (799, 4)
    square = reshaped(sizes, (4, 4), (Dim((1,), -3, True),) * 2, (16,))
    assert square is not None and sizes.shape((16,), square) == (121,)
