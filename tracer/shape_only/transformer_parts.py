"""One rank's share of a decoder's pieces as PyTorch modules, traced by shapes.

The split is that of Megatron-LM: the first product of attention and of the feed-forward part by columns, the second
by rows. The collectives between them move no values that shapes depend on and are left to the plan
(``planner.parallel``); where they change a tensor's size (sequence and expert parallelism), an empty tensor of
the new size stands in their place. Every expert of a rank gets as many tokens as the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.graph import ExecutionGraph, Phase
from tracer.shape_only.devices import TracedDevice
from tracer.shape_only.trace import trace_step
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape
from tracer.shape_only.transformer_layers import (
    RoutedPart,
    SplitFeedForward,
    StateSpaceMixer,
    attention_of,
    norm_of,
    on_all_tokens,
)

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


class _LossInSteps(torch.autograd.Function):
    """The loss as Megatron-LM computes it where ranks share the vocabulary: softmax by its parts, on fp32 logits."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        shifted = logits - logits.amax(dim=-1, keepdim=True)
        chosen = torch.gather(shifted, -1, targets.unsqueeze(-1))
        powers = torch.exp(shifted)
        total = powers.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(powers.div_(total), targets)
        return (total.log() - chosen).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        share, targets = ctx.saved_tensors
        share.scatter_add_(-1, targets.unsqueeze(-1), torch.full_like(targets, -1, dtype=share.dtype).unsqueeze(-1))
        return share.mul_(grads[0]), None


class Block(nn.Module):
    """One rank's share of a block; ``forward`` takes and gives ``[seq, batch, hidden]``."""

    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.shape, self.part = shape, part
        self.attention_norm, self.forward_norm = norm_of(shape), norm_of(shape) if shape.norms > 1 else None
        self.after = nn.ModuleList(norm_of(shape) for _ in range(shape.norms - 2))
        self.mixers = nn.ModuleList(_mixers(shape, part))
        self.feed_forward = _feed_forward(shape, part)
        self.merge = _Merge(shape) if shape.merges else None

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """Attention or what is in its place, and the feed-forward part, each added to its unnormalised input."""
        if self.merge is not None:
            x = self.merge(x)
        first = self.attention_norm(x)
        if self.mixers:
            x = self._added(x, on_all_tokens(self._mixed, first, self.part, angles), 0)
        if self.feed_forward is None:
            return x
        inner = first if self.forward_norm is None else self.forward_norm(x)
        routed = isinstance(self.feed_forward, RoutedPart)
        return self._added(
            x, self.feed_forward(inner) if routed else on_all_tokens(self.feed_forward, inner, self.part), 1)

    def _mixed(self, x: Tensor, angles: Tensor | None) -> Tensor:
        first, *others = (mixer(x) if isinstance(mixer, StateSpaceMixer) else mixer(x, angles)
                          for mixer in self.mixers)
        return sum(others, first)

    def _added(self, x: Tensor, inner: Tensor, which: int) -> Tensor:
        if self.after:
            inner = self.after[which](inner)
        return x + F.dropout(inner, self.shape.dropout)


def _mixers(shape: TransformerShape, part: TransformerPart) -> Iterator[nn.Module]:
    if shape.attends:
        yield attention_of(shape, part)
    if shape.state is not None:
        yield StateSpaceMixer(shape, part, shape.state)


def _feed_forward(shape: TransformerShape, part: TransformerPart) -> nn.Module | None:
    if shape.experts:
        return RoutedPart(shape, part)
    return SplitFeedForward(shape, shape.ffn // part.tp) if shape.ffn else None


class _Merge(nn.Module):
    """The stream and the next token's embedding, normalised side by side, in one product; and the norm before the
    head, whose parameters are the module's own."""

    def __init__(self, shape: TransformerShape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(norm_of(shape) for _ in range(3))
        self.product = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.product(torch.cat((self.norms[0](x), self.norms[1](torch.empty_like(x))), dim=-1))


class _Embedding(nn.Module):
    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.tokens = nn.Embedding(-(-shape.vocab // part.tp), shape.hidden)
        rows = shape.learned_positions
        self.places = nn.Embedding(rows, shape.hidden) if rows else None

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = self.tokens(ids)
        return F.dropout(x if self.places is None else x + self.places(places), self.dropout)


class _Head(nn.Module):
    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.fused_loss = shape.fused_loss
        self.norm = norm_of(shape)
        self.logits = nn.Linear(shape.hidden, -(-shape.vocab // part.tp), bias=False)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        logits = self.logits(self.norm(x)).float()
        if not self.fused_loss:
            return _LossInSteps.apply(logits, targets)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def trace_part(shape: TransformerShape, part: TransformerPart, device: str | TracedDevice) -> ExecutionGraph:
    """Trace forward and backward of a part for one micro-batch; gradients accumulate onto what is there.

    Raises:
        ShapeOnlyError: the shape does not divide as the part wants it.
    """
    part.check(shape)
    run = _runner(shape, part)

    def build() -> Callable[[], object]:
        module, forward = run()
        for parameter in module.parameters():  # what a step before this one would leave
            parameter.grad = torch.empty_like(parameter)

        def step() -> None:
            out = forward()
            out.backward(torch.empty_like(out) if out.ndim else None)

        return step

    return trace_step(build, device, warmup=0, source=f"{part.piece.value} of a transformer")


def kept_by_forward(graph: ExecutionGraph) -> int:
    """Return the bytes that forward of a traced part keeps for backward, its own output among them: what is there more
    than before the step when the output's gradient is made, which is the last that is done before backward."""
    before = int(np.count_nonzero(graph.ops.phase != Phase.BACKWARD)) - 1
    changes = graph.allocations
    total = np.concatenate(([0], changes.total_bytes))
    start, end = (int(total[np.searchsorted(changes.op, row)]) for row in (0, before))
    return end - start


def trace_optimizer(shape: TransformerShape, part: TransformerPart, device: str | TracedDevice) -> ExecutionGraph:
    """Trace the optimizer's work for one block: with half-precision parameters, gradients to fp32, Adam on fp32
    copies in one kernel, and the copies back to the parameters."""
    part.check(shape)

    def build() -> Callable[[], object]:
        half = _on_device(Block(shape, part), shape)
        own = [p.detach() for p in half.parameters()]
        masters = [nn.Parameter(p.float() if p.dtype != torch.float32 else p) for p in own]
        grads = [torch.empty_like(p) for p in own]
        adam = torch.optim.AdamW(masters, fused=True)

        def step() -> None:
            for master, grad in zip(masters, grads, strict=True):
                master.grad = grad.float()
            adam.step()
            if shape.dtype != "fp32":
                torch._foreach_copy_(own, [m.detach() for m in masters])

        return step

    return trace_step(build, device, source="optimizer of a block")


def _on_device(module: nn.Module, shape: TransformerShape) -> nn.Module:
    return module.to("cuda", DTYPES[shape.dtype])


def _runner(shape: TransformerShape, part: TransformerPart) -> Callable[[], tuple[nn.Module, Callable[[], Tensor]]]:
    """A function that builds the part inside the trace and returns it and its forward."""

    def build() -> tuple[nn.Module, Callable[[], Tensor]]:
        seq, batch = shape.seq // part.cp, part.microbatch
        own = seq // part.tp if part.sequence_parallel else seq
        kind = DTYPES[shape.dtype]
        if part.piece is Piece.EMBEDDING:
            embedding = _on_device(_Embedding(shape, part), shape)
            ids = torch.empty(seq, batch, dtype=torch.int64, device="cuda")
            places = torch.empty(seq, 1, dtype=torch.int64, device="cuda")
            return embedding, lambda: embedding(ids, places)
        if part.piece is Piece.HEAD:
            head = _on_device(_Head(shape, part), shape)
            x = torch.empty(seq, batch, shape.hidden, dtype=kind, device="cuda", requires_grad=True)
            targets = torch.empty(seq, batch, dtype=torch.int64, device="cuda")
            return head, lambda: head(_fresh(x), targets)
        block = _on_device(Block(shape, part), shape)
        x = torch.empty(own, batch, shape.hidden, dtype=kind, device="cuda", requires_grad=True)
        turned = shape.width_of_head if shape.latent is None else shape.latent.rotated
        turns = shape.rotary and shape.attends
        angles = torch.empty(seq, 1, 1, turned, dtype=kind, device="cuda") if turns else None
        return block, lambda: block(_fresh(x), angles)

    return build


def _fresh(x: Tensor) -> Tensor:
    """The input as another part's output: its gradient is handed on, not accumulated."""
    x.grad = None
    return x
