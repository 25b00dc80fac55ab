"""Lightning's Fabric trains an autoregressive GRU with clipped gradients."""

from collections.abc import Callable

import torch
from lightning.fabric import Fabric
from torch import nn


class NextToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(300, 48), nn.Linear(64, 300)
        self.rnn = nn.GRU(48, 64, 2, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(self.embedding(tokens))[0])


def build(batch: int = 8, seq: int = 24) -> Callable[[], None]:
    fabric = Fabric(accelerator="cpu", devices=1)
    plain = NextToken()
    model, optimizer = fabric.setup(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))

    def step() -> None:
        tokens = torch.randint(300, (batch, seq + 1))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
