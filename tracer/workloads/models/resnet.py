"""ResNet with bottleneck blocks; with depth 50 and width 64 it is the ResNet-50 everybody benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import RESNET_STAGES, ResnetSettings
from tracer.workloads.data import Batch, images
from tracer.workloads.models.layers import run_block
from tracer.workloads.workload import Definition

EXPANSION = 4
"""Channels out of a bottleneck, as a multiple of its inner channels."""


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the image's size (at stride 1), and batch norm."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False), nn.BatchNorm2d(outputs))


class Bottleneck(nn.Module):
    """1×1 down to ``inner`` channels, 3×3 (with the stride), 1×1 up; the input is added before the last ReLU."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * inner
        self.reduce = convolution(inputs, inner, 1)
        self.spatial = convolution(inner, inner, 3, stride)
        self.expand = convolution(inner, outputs, 1)
        self.shortcut = convolution(inputs, outputs, 1, stride) if stride > 1 or inputs != outputs else nn.Identity()
        self.relu = nn.ReLU(inplace=True)
        nn.init.zeros_(self.expand[1].weight)  # a block starts as the identity, so that deep ones train at once

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, inputs, height, width]`` → ``[batch, 4 * inner, height / stride, width / stride]``."""
        inner = self.relu(self.spatial(self.relu(self.reduce(x))))
        return self.relu(self.expand(inner) + self.shortcut(x))


class Resnet(nn.Module):
    """Images ``[batch, 3, resolution, resolution]`` → class logits ``[batch, classes]``."""

    def __init__(self, settings: ResnetSettings) -> None:
        super().__init__()
        self.checkpointing = settings.checkpointing
        self.stem = nn.Sequential(
            *convolution(3, settings.width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, stride=2, padding=1))
        blocks = []
        channels = settings.width
        for stage, depth in enumerate(RESNET_STAGES[settings.depth]):
            inner = settings.width * 2**stage
            for number in range(depth):
                blocks.append(Bottleneck(channels, inner, stride=2 if stage and not number else 1))
                channels = EXPANSION * inner
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, settings.classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """Classify each image."""
        x = self.stem(pixels)
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _batch(settings: ResnetSettings, generator: torch.Generator) -> Batch:
    batch = images(settings.batch, settings.resolution, settings.classes, generator)
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    return Batch((batch.inputs[0].contiguous(memory_format=layout),), batch.targets)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


DEFINITION = Definition(Resnet, _batch, _loss)
