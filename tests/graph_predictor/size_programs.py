"""Random small training programs whose layers are as wide as their batch, traced by shapes at two batch sizes."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tracer
from tracer.graph import ExecutionGraph

Program = tuple[nn.Module, Callable[[int], Any], Callable[[nn.Module, Any], Tensor]]


class FusedAttention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0), is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))


class WrittenAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.q(x) @ self.k(x).transpose(-1, -2)).softmax(-1) @ x


class Bags(nn.Module):
    def __init__(self, width: int, dense: int, out: int, each: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(100, width, mode="sum") for _ in range(3))
        self.below, self.above, self.each = nn.Linear(dense, width), nn.Linear(4 * width, out), each

    def forward(self, batch: tuple[Tensor, list[Tensor]]) -> Tensor:
        x, indices = batch
        offsets = torch.arange(0, len(x) * self.each, self.each)
        bags = [table(one, offsets) for table, one in zip(self.tables, indices, strict=True)]
        return self.above(torch.cat([self.below(x), *bags], 1))


def perceptron(draw: random.Random, batch: int) -> Program:
    widths = [draw.choice([batch, 2 * batch, 3 * batch, 48, 10, batch * batch]) for _ in range(draw.randint(2, 5))]
    layers: list[nn.Module] = []
    for inner, outer in pairwise(widths):
        layers += [nn.Linear(inner, outer), draw.choice([
            nn.ReLU(), nn.GELU(), nn.LayerNorm(outer), nn.BatchNorm1d(outer), nn.Dropout(0.1)])]
    return nn.Sequential(*layers), lambda n: torch.randn(n, widths[0]), lambda model, x: model(x).pow(2).mean()


def tokens(draw: random.Random, batch: int) -> Program:
    width = 2 * draw.choice([batch, 2 * batch])
    length, vocabulary = draw.choice([batch, 2 * batch, 7, batch - 1]), draw.choice([batch, 50, 2 * batch])
    blocks = [draw.choice([
        FusedAttention(width, 2), WrittenAttention(width), nn.LayerNorm(width),
        nn.Sequential(nn.Linear(width, 2 * batch), nn.GELU(), nn.Linear(2 * batch, width))])
        for _ in range(draw.randint(1, 4))]
    model = nn.Sequential(nn.Embedding(vocabulary, width), *blocks, nn.Linear(width, vocabulary, bias=False))
    return (model, lambda n: torch.randint(vocabulary, (n, length)),
            lambda model, x: F.cross_entropy(model(x).flatten(0, 1), x.flatten()))


def images(draw: random.Random, batch: int) -> Program:
    channels, edge = draw.choice([batch, 3, 2 * batch]), draw.choice([8, batch])
    model = nn.Sequential(
        nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
        nn.Conv2d(channels, 2 * batch, 3, stride=2, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(2 * batch, batch))
    return model, lambda n: torch.randn(n, 3, edge, edge), lambda model, x: model(x).square().sum()


def bags(draw: random.Random, batch: int) -> Program:
    width, each, dense = draw.choice([batch, 2 * batch]), draw.choice([1, 3, batch]), draw.choice([batch, 13])
    model = Bags(width, dense, batch, each)
    return (model, lambda n: (torch.randn(n, dense), [torch.randint(100, (n * each,)) for _ in range(3)]),
            lambda model, x: model(x).mean())


PROGRAMS = {"perceptron": perceptron, "tokens": tokens, "images": images, "bags": bags}


def traced(kind: str, seed: int) -> tuple[int, ExecutionGraph, ExecutionGraph]:
    """The batch, and a step of it and of three times as many."""
    batch = random.Random(seed).choice([4, 6, 8, 16])
    return batch, _trace(kind, seed, batch, batch), _trace(kind, seed, batch, 3 * batch)


def _trace(kind: str, seed: int, batch: int, samples: int) -> ExecutionGraph:
    def build() -> Callable[[], None]:
        draw = random.Random(seed)
        model, data, loss = PROGRAMS[kind](draw, batch)
        optimizer = draw.choice([torch.optim.SGD(model.parameters(), lr=0.1, foreach=False),
                                 torch.optim.AdamW(model.parameters(), foreach=True)])
        x = data(samples)

        def step() -> None:
            optimizer.zero_grad()
            loss(model, x).backward()
            optimizer.step()

        return step

    return tracer.trace_step(build, device="h100-sxm")
