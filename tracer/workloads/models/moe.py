"""A mixture of experts: the Llama decoder with top-k routed SwiGLU experts of fixed capacity.

Routing decides at run time, shapes and Python do not: every expert has ``capacity`` places for the tokens of a
micro-batch, a token's place is its rank among the choices of that expert (a running count), and choices beyond the
capacity go to one spare row that is thrown away, so those tokens pass the block by its residual only. All experts
then run as one batched product. No Python control flow reads a tensor, so the step compiles to one graph, never
waits for the device and can be traced by shapes alone; the price is work on empty places, as in GShard and Switch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.workloads.catalogue import MoeSettings
from tracer.workloads.models.layers import initialise, run_block, token_loss
from tracer.workloads.models.llama import EPSILON, GroupedAttention, llama_batch, rotary_angles
from tracer.workloads.workload import Definition

BALANCE_WEIGHT = 0.01
"""Weight of the load-balancing loss, as in the Switch Transformer."""


class Experts(nn.Module):
    """All experts' SwiGLU at once: ``[experts, places, width]`` → the same."""

    def __init__(self, settings: MoeSettings) -> None:
        super().__init__()
        inwards = (settings.experts, settings.width, settings.hidden)
        self.gate = nn.Parameter(torch.empty(inwards))
        self.up = nn.Parameter(torch.empty(inwards))
        self.down = nn.Parameter(torch.empty(settings.experts, settings.hidden, settings.width))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Each expert treats its own places."""
        return torch.bmm(F.silu(torch.bmm(x, self.gate)) * torch.bmm(x, self.up), self.down)


class RoutedFeedForward(nn.Module):
    """Send each token to ``top_k`` experts and add up their answers by the router's weights."""

    def __init__(self, settings: MoeSettings) -> None:
        super().__init__()
        self.experts_count = settings.experts
        self.top_k = settings.top_k
        self.capacity = settings.capacity
        self.router = nn.Linear(settings.width, settings.experts, bias=False)
        self.experts = Experts(settings)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, seq, width]`` → the same, and the load-balancing loss (a scalar, 1 at perfect balance)."""
        rows = x.flatten(0, 1)  # [tokens, width]
        places = math.ceil(self.capacity * rows.shape[0] * self.top_k / self.experts_count)
        shares = self.router(rows).float().softmax(dim=-1)  # [tokens, experts]
        weights, chosen = shares.topk(self.top_k, dim=-1)  # [tokens, top_k]
        weights = weights / weights.sum(dim=-1, keepdim=True)

        choices = F.one_hot(chosen.flatten(), self.experts_count)  # [tokens * top_k, experts]
        rank = ((choices.cumsum(dim=0) - 1) * choices).sum(dim=-1)
        spare = self.experts_count * places
        slots = torch.where(rank < places, chosen.flatten() * places + rank, spare)  # [tokens * top_k]

        sent = rows.repeat_interleave(self.top_k, dim=0, output_size=rows.shape[0] * self.top_k)
        table = rows.new_zeros(spare + 1, rows.shape[1]).index_copy(0, slots, sent)
        answers = self.experts(table[:spare].unflatten(0, (self.experts_count, places))).flatten(0, 1)
        answers = torch.cat((answers, answers.new_zeros(1, answers.shape[1])))  # what the spare row answers
        received = answers.index_select(0, slots).unflatten(0, (-1, self.top_k))  # [tokens, top_k, width]
        mixed = (received * weights.to(received.dtype).unsqueeze(-1)).sum(dim=1)

        load = choices.float().mean(dim=0)  # share of choices each expert got
        balance = self.experts_count * (load * shares.mean(dim=0)).sum()
        return mixed.view_as(x), balance


class MoeBlock(nn.Module):
    """Attention and routed experts, each added to its unnormalised input."""

    def __init__(self, settings: MoeSettings) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.attention = GroupedAttention(settings)
        self.forward_norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.feed_forward = RoutedFeedForward(settings)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor]:
        """``[batch, seq, width]`` → the same, and the block's load-balancing loss."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        mixed, balance = self.feed_forward(self.forward_norm(x))
        return x + mixed, balance


class Moe(nn.Module):
    """Token numbers ``[batch, seq]`` → logits ``[batch, seq, vocabulary]`` and the blocks' mean balance loss."""

    cosines: Tensor
    sines: Tensor

    def __init__(self, settings: MoeSettings) -> None:
        super().__init__()
        self.checkpointing = settings.checkpointing
        self.tokens = nn.Embedding(settings.vocabulary, settings.width)
        self.blocks = nn.ModuleList(MoeBlock(settings) for _ in range(settings.depth))
        self.norm = nn.RMSNorm(settings.width, eps=EPSILON)
        self.head = nn.Linear(settings.width, settings.vocabulary, bias=False)
        cosines, sines = rotary_angles(settings.seq, settings.width // settings.heads)
        self.register_buffer("cosines", cosines, persistent=False)
        self.register_buffer("sines", sines, persistent=False)
        initialise(self)

    def forward(self, text: Tensor) -> tuple[Tensor, Tensor]:
        """Predict each next token."""
        x = self.tokens(text)
        balances = []
        for block in self.blocks:
            x, balance = run_block(block, self.checkpointing, x, self.cosines, self.sines)
            balances.append(balance)
        return self.head(self.norm(x)), torch.stack(balances).mean()


def _loss(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    logits, balance = output
    return token_loss(logits, targets) + BALANCE_WEIGHT * balance


DEFINITION = Definition(Moe, llama_batch, _loss)
