"""PyTorch's own nn.Transformer, encoder and decoder, learning to copy."""

from collections.abc import Callable

import torch
from torch import nn


class Copier(nn.Module):
    def __init__(self, width: int = 120) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(600, width), nn.Linear(width, 600)
        self.body = nn.Transformer(width, 4, 2, 2, 360, 0.1, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        return self.head(self.body(x, x, tgt_mask=mask, tgt_is_causal=True))


def build(batch: int = 5, seq: int = 38) -> Callable[[], None]:
    model = Copier().train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens = torch.randint(600, (batch, seq))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
