"""The optimizers of the suite, each with its implementation spelt out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from tracer.workloads.settings import OptimizerKind

LEARNING_RATE = {"sgd": 0.01, "adamw": 1e-3}
MOMENTUM = 0.9
WEIGHT_DECAY = 0.01

_MAKERS: dict[OptimizerKind, Callable[[Any], torch.optim.Optimizer]] = {
    OptimizerKind.SGD: lambda groups: torch.optim.SGD(
        groups, lr=LEARNING_RATE["sgd"], momentum=MOMENTUM, foreach=True),
    OptimizerKind.ADAMW: lambda groups: torch.optim.AdamW(
        groups, lr=LEARNING_RATE["adamw"], weight_decay=WEIGHT_DECAY, foreach=False),
    OptimizerKind.ADAMW_FOREACH: lambda groups: torch.optim.AdamW(
        groups, lr=LEARNING_RATE["adamw"], weight_decay=WEIGHT_DECAY, foreach=True),
    OptimizerKind.ADAMW_FUSED: lambda groups: torch.optim.AdamW(
        groups, lr=LEARNING_RATE["adamw"], weight_decay=WEIGHT_DECAY, fused=True),
}


def make_optimizer(kind: OptimizerKind, model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer of all parameters; those with sparse gradients form a second group without momentum."""
    sparse = {id(module.weight) for module in model.modules() if getattr(module, "sparse", False)}
    dense_group = {"params": [value for value in model.parameters() if id(value) not in sparse]}
    sparse_group = {"params": [value for value in model.parameters() if id(value) in sparse], "momentum": 0.0}
    return _MAKERS[kind]([dense_group, sparse_group] if sparse else [dense_group])


def parameter_count(parameters: Iterable[torch.Tensor]) -> int:
    """Trainable numbers in all, a shared tensor counted once."""
    return sum(tensor.numel() for tensor in {id(tensor): tensor for tensor in parameters}.values())
