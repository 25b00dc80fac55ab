"""ViT: an image cut into patches, a class token in front, pre-norm blocks, and a linear head on that token."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import VitSettings
from tracer.workloads.data import Batch, images
from tracer.workloads.models.layers import PreNormBlock, initialise, run_block
from tracer.workloads.workload import Definition

EPSILON = 1e-6
"""Epsilon of every layer norm, as in the published model."""


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
            PreNormBlock(width, settings.heads, settings.dropout, causal=False, epsilon=EPSILON)
            for _ in range(settings.depth))
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.head = nn.Linear(width, settings.classes)
        nn.init.normal_(self.positions, std=0.02)
        initialise(self)

    def forward(self, pixels: Tensor) -> Tensor:
        """Classify each image."""
        x = self.patches(pixels).flatten(2).transpose(1, 2)  # [batch, patches, width]
        x = torch.cat((self.class_token.expand(x.shape[0], -1, -1), x), dim=1)
        x = self.dropout(x + self.positions)
        for block in self.blocks:
            x = run_block(block, self.checkpointing, x)
        return self.head(self.norm(x)[:, 0])


def _batch(settings: VitSettings, generator: torch.Generator) -> Batch:
    return images(settings.batch, settings.resolution, settings.classes, generator)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), targets)


DEFINITION = Definition(Vit, _batch, _loss)
