"""Parts that several models share: checkpointing, initialisation, attention and feed-forward of BERT, GPT-2, ViT."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def run_block(block: nn.Module, checkpointing: bool, *inputs: Any) -> Any:
    """``block(*inputs)``; with checkpointing only the inputs are kept and backward runs the block again."""
    if checkpointing:
        return checkpoint(block, *inputs, use_reentrant=False)
    return block(*inputs)


def initialise(module: nn.Module, std: float = 0.02) -> None:
    """Weights of linear and embedding layers normal with ``std``, biases zero: as GPT-2 and BERT start."""
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=std)
            if isinstance(part, nn.Linear) and part.bias is not None:
                nn.init.zeros_(part.bias)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy in fp32 of ``[batch, seq, vocabulary]`` against ``[batch, seq]``; targets of -100 are out."""
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def click_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean binary cross entropy in fp32 of logits ``[batch]`` against 0 and 1."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets)


class SelfAttention(nn.Module):
    """Multi-head attention with one product for queries, keys and values. ``[batch, seq, width]`` → the same."""

    def __init__(self, width: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.head_size = width // heads
        self.dropout = dropout
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend within each sample."""
        q, k, v = (part.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(
            q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=self.causal)
        return self.out(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Sequential):
    """Linear to four times the width, GELU, linear back."""

    def __init__(self, width: int, *, approximate: str = "none") -> None:
        super().__init__(nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width))


class PreNormBlock(nn.Module):
    """Attention and feed-forward, each added to its unnormalised input (GPT-2, ViT)."""

    def __init__(
        self, width: int, heads: int, dropout: float, *, causal: bool, epsilon: float, approximate: str = "none",
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, eps=epsilon)
        self.attention = SelfAttention(width, heads, dropout, causal=causal)
        self.forward_norm = nn.LayerNorm(width, eps=epsilon)
        self.feed_forward = FeedForward(width, approximate=approximate)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, seq, width]`` → the same."""
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.feed_forward(self.forward_norm(x)))
