"""U-Net: convolutions down and up again, each level joined to the one it came from, a class for every pixel."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import Norm, UnetSettings
from tracer.workloads.data import Batch
from tracer.workloads.models.layers import run_block
from tracer.workloads.workload import Definition


class DoubleConvolution(nn.Sequential):
    """Twice a 3×3 convolution, norm and ReLU: ``[batch, inputs, h, w]`` → ``[batch, outputs, h, w]``."""

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
        """The double convolutions, downwards and upwards."""
        return [self.first, *self.down, *self.up]

    def forward(self, pixels: Tensor) -> Tensor:
        """Classify each pixel."""
        levels = [run_block(self.first, self.checkpointing, pixels)]
        for down in self.down:
            levels.append(run_block(down, self.checkpointing, levels[-1]))
        x = levels.pop()
        for raise_size, up in zip(self.raise_size, self.up, strict=True):
            x = run_block(up, self.checkpointing, torch.cat((levels.pop(), raise_size(x)), dim=1))
        return self.head(x)


def _batch(settings: UnetSettings, generator: torch.Generator) -> Batch:
    side = settings.resolution
    pixels = torch.randn(settings.batch, 3, side, side, generator=generator)
    layout = torch.channels_last if settings.channels_last else torch.contiguous_format
    targets = torch.randint(settings.classes, (settings.batch, side, side), generator=generator)
    return Batch((pixels.contiguous(memory_format=layout),), targets)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


DEFINITION = Definition(Unet, _batch, _loss)
