"""Programs in plain PyTorch for fake worlds: blocks under DTensor's sequence parallelism, under FSDP2 with parameters
kept or with copies, and with an optimizer that shares its state (ZeRO-1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WIDTH, INNER, BLOCKS, BATCH, SEQ = 64, 256, 2, 4, 16
STREAM = BATCH * SEQ * WIDTH * 4
PARAMETERS = 4 * (2 * WIDTH * (WIDTH + INNER) + 4 * WIDTH)
"""Bytes of a block's parameters."""
Step = Callable[[], None]


class Part(nn.Module):
    """Attention or the feed-forward part, as far as tensor parallelism is concerned: two products."""

    def __init__(self, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, inner, bias=False), nn.Linear(inner, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


class Block(nn.Module):
    """Two such parts with their norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.parts = nn.ModuleList([Part(WIDTH), Part(INNER)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, part in zip(self.norms, self.parts, strict=True):
            x = x + part(norm(x))
        return x


def _blocks() -> nn.Sequential:
    return nn.Sequential(*[Block() for _ in range(BLOCKS)]).cuda()


def _step(model: nn.Module, optimizer: torch.optim.Optimizer | None = None, tokens: int = SEQ) -> Step:
    x = torch.randn(BATCH, tokens, WIDTH, device="cuda", requires_grad=True)
    chosen = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(x).square().mean().backward()
        chosen.step()
        chosen.zero_grad()

    return step


def sequence_parallel() -> Step:
    """Norms on shares of the sequence, gathered before each part and reduced to shares after it."""
    mesh, blocks = init_device_mesh("cuda", (get_world_size(),)), _blocks()
    for block in blocks:
        parts = {f"parts.{i}": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
                 for i in (0, 1)}
        products = {f"parts.{i}.up": ColwiseParallel() for i in (0, 1)} | {
            f"parts.{i}.down": RowwiseParallel(output_layouts=Shard(1)) for i in (0, 1)}
        parallelize_module(block, mesh, {"norms.0": SequenceParallel(), "norms.1": SequenceParallel(), **parts,
                                         **products})
    return _step(blocks, tokens=SEQ // mesh.size())


def kept_parameters() -> Step:
    """FSDP2 that keeps parameters until backward has ended (ZeRO-2)."""
    return _sharded((get_world_size(),), reshard_after_forward=False)


def copies() -> Step:
    """FSDP2 over half of the ranks, twice (HSDP)."""
    return _sharded((2, get_world_size() // 2))


def _sharded(sizes: tuple[int, ...], **how: bool) -> Step:
    mesh, blocks = init_device_mesh("cuda", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes):]), _blocks()
    for each in (*blocks, blocks):
        fully_shard(each, mesh=mesh, **how)
    return _step(blocks)


def shared_optimizer() -> Step:
    """DDP with an optimizer whose state its ranks share (ZeRO-1)."""
    model = nn.parallel.DistributedDataParallel(_blocks())
    return _step(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1))
