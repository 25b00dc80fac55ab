"""One rank's share of a decoder's pieces as PyTorch modules, traced by shapes.

The split is that of Megatron-LM: the first product of attention and of the feed-forward part by columns, the second
by rows. The collectives between them move no values that shapes depend on and are left to the plan
(``graph_predictor.parallel``); where they change a tensor's size (sequence and expert parallelism), an empty tensor of
the new size stands in their place. Every expert gets as many tokens as the others.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tracer.graph import ExecutionGraph
from tracer.shape_only.devices import TracedDevice
from tracer.shape_only.trace import trace_step
from tracer.shape_only.transformer import Piece, TransformerPart, TransformerShape

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
EPSILON = 1e-5


class _Resized(torch.autograd.Function):
    """A stand-in for a collective that changes a tensor's first dimension: an empty tensor of that size, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        ctx.rows = x.shape[0]
        return x.new_empty(rows, *x.shape[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].new_empty(ctx.rows, *grads[0].shape[1:]), None


@contextmanager
def _gathered_again(gathered: Tensor, shard: Tensor) -> Iterator[None]:
    """Keep a rank's own part of what was gathered for backward, as Megatron-LM does, which gathers it once more there
    (Korthikanti et al., 2022, section 4.2.2)."""
    whole = gathered.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | tuple[Tensor, torch.Size]:
        return (shard, saved.shape) if saved.untyped_storage()._cdata == whole else saved

    def unpack(kept: Tensor | tuple[Tensor, torch.Size]) -> Tensor:
        return kept if isinstance(kept, Tensor) else kept[0].new_empty(kept[1])

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


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


def _norm(shape: TransformerShape) -> nn.Module:
    return nn.RMSNorm(shape.hidden, EPSILON) if shape.rms else nn.LayerNorm(shape.hidden, EPSILON)


class _Attention(nn.Module):
    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.shape, self.part = shape, part
        self.d = shape.width_of_head
        self.heads, self.kv_heads = shape.heads // part.tp, shape.kv_heads // part.tp
        self.qkv = nn.Linear(shape.hidden, (self.heads + 2 * self.kv_heads) * self.d, shape.bias)
        self.out = nn.Linear(self.heads * self.d, shape.hidden, shape.bias)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """``[seq, batch, hidden]`` → the same."""
        seq, batch, _ = x.shape
        # As Megatron-LM lays them out, each group of heads beside its keys and values.
        each = self.heads // self.kv_heads
        qkv = self.qkv(x).view(seq, batch, self.kv_heads, each + 2, self.d)
        q, k, v = (t.reshape(seq, batch, -1, self.d) for t in qkv.split([each, 1, 1], dim=3))
        if angles is not None:
            q, k = _turned(q, angles), _turned(k, angles)
        if self.part.cp > 1:  # of a causal half, each rank of cp does 1/cp: half of the keys for each of its queries
            whole = seq * self.part.cp // 2
            k, v = _Resized.apply(k, whole), _Resized.apply(v, whole)
        attended = self._fused(q, k, v) if self.shape.flash else self._plain(q, k, v)
        return self.out(attended.reshape(seq, batch, self.heads * self.d))

    def _fused(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.shape.dropout, is_causal=self.part.cp == 1,
                                             enable_gqa=self.heads != self.kv_heads)
        return out.permute(2, 0, 1, 3)

    def _plain(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Products, and scale, mask and softmax in one kernel."""
        if self.heads != self.kv_heads:
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=2) for t in (k, v))
        seq, batch = q.shape[:2]
        q, k, v = (t.reshape(t.shape[0], batch * self.heads, self.d).transpose(0, 1) for t in (q, k, v))
        scores = torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
        scores = F.dropout(scores, self.shape.dropout)
        return torch.bmm(scores, v).transpose(0, 1).reshape(seq, batch, self.heads, self.d)


def _turned(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angles + torch.cat((-second, first), dim=-1) * angles


class _FeedForward(nn.Module):
    def __init__(self, shape: TransformerShape, tp: int) -> None:
        super().__init__()
        inner = shape.ffn // tp
        self.gated = shape.gated
        self.up = nn.Linear(shape.hidden, inner * (2 if shape.gated else 1), shape.bias)
        self.down = nn.Linear(inner, shape.hidden, shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self.gated:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class _Experts(nn.Module):
    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.shape, self.part = shape, part
        self.router = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleList(_FeedForward(shape, part.tp) for _ in range(shape.experts // part.ep))

    def forward(self, x: Tensor) -> Tensor:
        seq, batch, width = x.shape
        tokens = x.reshape(seq * batch, width)
        weight, _ = torch.topk(torch.softmax(self.router(tokens), dim=-1), self.shape.top_k, dim=-1)
        place = torch.empty(len(tokens) * self.shape.top_k, dtype=torch.int64, device=x.device)
        sent = torch.index_select(tokens, 0, place % len(tokens))
        received = _Resized.apply(sent, len(sent))
        done = torch.cat([expert(rows) for expert, rows in zip(
            self.experts, received.chunk(len(self.experts)), strict=True)])
        back = torch.index_select(_Resized.apply(done, len(sent)), 0, place)
        return (back.view(len(tokens), self.shape.top_k, width) * weight.unsqueeze(-1)).sum(1).view(seq, batch, width)


class Block(nn.Module):
    """One rank's share of a block; ``forward`` takes and gives ``[seq, batch, hidden]``."""

    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.shape, self.part = shape, part
        self.attention_norm, self.forward_norm = _norm(shape), _norm(shape)
        self.attention = _Attention(shape, part)
        self.feed_forward: nn.Module = _Experts(shape, part) if shape.experts else _FeedForward(shape, part.tp)

    def forward(self, x: Tensor, angles: Tensor | None) -> Tensor:
        """Attention and the feed-forward part, each added to its unnormalised input."""
        own = x.shape[0]
        whole = own * self.part.tp if self.part.sequence_parallel else own
        for norm, layer in ((self.attention_norm, lambda y: self.attention(y, angles)),
                            (self.forward_norm, self.feed_forward)):
            inner = norm(x)
            if whole == own:
                inner = layer(inner)
            else:
                gathered = _Resized.apply(inner, whole)
                with _gathered_again(gathered, inner):
                    inner = layer(gathered)
                inner = _Resized.apply(inner, own)
            x = x + F.dropout(inner, self.shape.dropout)
        return x


class _Embedding(nn.Module):
    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.dropout = shape.dropout
        self.tokens = nn.Embedding(-(-shape.vocab // part.tp), shape.hidden)
        self.places = None if shape.rotary else nn.Embedding(shape.seq, shape.hidden)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        x = self.tokens(ids)
        return F.dropout(x if self.places is None else x + self.places(places), self.dropout)


class _Head(nn.Module):
    def __init__(self, shape: TransformerShape, part: TransformerPart) -> None:
        super().__init__()
        self.fused_loss = shape.fused_loss
        self.norm = _norm(shape)
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
        forward = run()

        def step() -> None:
            out = forward()
            out.backward(torch.empty_like(out) if out.ndim else None)

        return step

    with _short_collections():
        return trace_step(build, device, source=f"{part.piece.value} of a transformer")


def trace_saved(shape: TransformerShape, part: TransformerPart, device: str | TracedDevice) -> int:
    """Bytes that forward of a part keeps for backward, for one micro-batch; its own output is among them."""
    part.check(shape)
    run = _runner(shape, part)
    held: list[Tensor] = []

    def build() -> Callable[[], object]:
        forward = run()
        return lambda: held.append(forward())

    with _short_collections():
        memory = trace_step(build, device, warmup=0).meta.memory
    held.clear()
    return int(memory["end"] - memory["start"])


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

    with _short_collections():
        return trace_step(build, device, source="optimizer of a block")


@contextmanager
def _short_collections() -> Iterator[None]:
    """Let the garbage collections of a trace leave alone what was there before: with PyTorch's modules among it, they
    take several times as long as tracing a piece."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _on_device(module: nn.Module, shape: TransformerShape) -> nn.Module:
    return module.to("cuda", DTYPES[shape.dtype])


def _runner(shape: TransformerShape, part: TransformerPart) -> Callable[[], Callable[[], Tensor]]:
    """A function that builds the part inside the trace and returns its forward."""

    def build() -> Callable[[], Tensor]:
        seq, batch = shape.seq // part.cp, part.microbatch
        own = seq // part.tp if part.sequence_parallel else seq
        kind = DTYPES[shape.dtype]
        if part.piece is Piece.EMBEDDING:
            embedding = _on_device(_Embedding(shape, part), shape)
            ids = torch.empty(seq, batch, dtype=torch.int64, device="cuda")
            places = torch.empty(seq, 1, dtype=torch.int64, device="cuda")
            return lambda: embedding(ids, places)
        if part.piece is Piece.HEAD:
            head = _on_device(_Head(shape, part), shape)
            x = torch.empty(seq, batch, shape.hidden, dtype=kind, device="cuda", requires_grad=True)
            targets = torch.empty(seq, batch, dtype=torch.int64, device="cuda")
            return lambda: head(_fresh(x), targets)
        block = _on_device(Block(shape, part), shape)
        x = torch.empty(own, batch, shape.hidden, dtype=kind, device="cuda", requires_grad=True)
        angles = torch.empty(seq, 1, 1, shape.width_of_head, dtype=kind, device="cuda") if shape.rotary else None
        return lambda: block(_fresh(x), angles)

    return build


def _fresh(x: Tensor) -> Tensor:
    """The input as another part's output: its gradient is handed on, not accumulated."""
    x.grad = None
    return x
