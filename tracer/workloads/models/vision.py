"""Models of images: a bottleneck ResNet, a U-Net that classifies every pixel, and a vision transformer."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import RESNET_STAGES, ResnetSettings, UnetSettings, VitSettings
from tracer.workloads.models.parts import Batch, Definition, PreNormBlock, images, initialise, run_block
from tracer.workloads.settings import Norm

EXPANSION = 4
"""Output channels of a bottleneck, as a multiple of its inner channels."""
VIT_EPSILON = 1e-6
"""Epsilon of ViT's layer norms, as published."""


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution that keeps the image's size (at stride 1), and batch norm."""
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
        """Map ``[batch, inputs, height, width]`` to ``[batch, 4 * inner, height / stride, width / stride]``."""
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
        """Return the logits of each image, ``[batch, classes]``."""
        x = self.stem(pixels)
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def _resnet_batch(settings: ResnetSettings, generator: torch.Generator) -> Batch:
    batch = images(settings.batch, settings.resolution, settings.classes, generator)
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    return Batch((batch.inputs[0].contiguous(memory_format=layout),), batch.targets)


class DoubleConvolution(nn.Sequential):
    """Two times a 3×3 convolution, norm and ReLU: ``[batch, inputs, h, w]`` → ``[batch, outputs, h, w]``."""

    def __init__(self, inputs: int, outputs: int, settings: UnetSettings) -> None:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), _norm(outputs, settings),
                       nn.ReLU(inplace=True)]
        super().__init__(*layers)


def _norm(channels: int, settings: UnetSettings) -> nn.Module:
    if settings.norm is Norm.GROUP:
        return nn.GroupNorm(settings.groups, channels)
    return nn.BatchNorm2d(channels)


class Unet(nn.Module):
    """Images ``[batch, 3, resolution, resolution]`` → pixel logits ``[batch, classes, resolution, resolution]``."""

    def __init__(self, settings: UnetSettings) -> None:
        super().__init__()
        self.checkpointing = settings.checkpointing
        channels = [settings.width * 2**level for level in range(settings.depth + 1)]
        self.first = DoubleConvolution(3, channels[0], settings)
        self.down = nn.ModuleList(
            nn.Sequential(nn.MaxPool2d(2), DoubleConvolution(above, below, settings))
            for above, below in pairwise(channels))
        self.raise_size = nn.ModuleList(
            nn.ConvTranspose2d(below, above, 2, stride=2)
            for above, below in zip(channels[-2::-1], channels[:0:-1], strict=True))
        self.up = nn.ModuleList(DoubleConvolution(2 * above, above, settings) for above in channels[-2::-1])
        self.head = nn.Conv2d(channels[0], settings.classes, 1)

    @property
    def blocks(self) -> list[nn.Module]:
        """Return the double convolutions, downwards and upwards."""
        return [self.first, *self.down, *self.up]

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of each pixel, ``[batch, classes, resolution, resolution]``."""
        levels = [run_block(self.first, self.checkpointing, pixels)]
        for down in self.down:
            levels.append(run_block(down, self.checkpointing, levels[-1]))
        x = levels.pop()
        for raise_size, up in zip(self.raise_size, self.up, strict=True):
            x = run_block(up, self.checkpointing, torch.cat((levels.pop(), raise_size(x)), dim=1))
        return self.head(x)


def _unet_batch(settings: UnetSettings, generator: torch.Generator) -> Batch:
    side = settings.resolution
    pixels = torch.randn(settings.batch, 3, side, side, generator=generator)
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    targets = torch.randint(settings.classes, (settings.batch, side, side), generator=generator)
    return Batch((pixels.contiguous(memory_format=layout),), targets)


class Vit(nn.Module):
    """Images ``[batch, 3, resolution, resolution]`` → class logits ``[batch, classes]``."""

    def __init__(self, settings: VitSettings) -> None:
        super().__init__()
        width, patch = settings.width, settings.patch
        self.checkpointing = settings.checkpointing
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.empty(1, (settings.resolution // patch) ** 2 + 1, width))
        self.dropout = nn.Dropout(settings.dropout)
        self.blocks = nn.ModuleList(
            PreNormBlock(width, settings.heads, settings.dropout, causal=False, epsilon=VIT_EPSILON)
            for _ in range(settings.depth))
        self.norm = nn.LayerNorm(width, eps=VIT_EPSILON)
        self.head = nn.Linear(width, settings.classes)
        nn.init.normal_(self.positions, std=0.02)
        initialise(self)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return the logits of each image, ``[batch, classes]``."""
        x = self.patches(pixels).flatten(2).transpose(1, 2)  # [batch, patches, width]
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x)
        return self.head(self.norm(x)[:, 0])


def _vit_batch(settings: VitSettings, generator: torch.Generator) -> Batch:
    return images(settings.batch, settings.resolution, settings.classes, generator)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


DEFINITIONS = {"resnet50": Definition(Resnet, _resnet_batch, _loss), "unet": Definition(Unet, _unet_batch, _loss),
               "vit": Definition(Vit, _vit_batch, _loss)}
