"""Classify sequences with torch's own TransformerEncoder."""

from collections.abc import Callable

import torch
from torch import nn


class Classifier(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(1500, width)
        layer = nn.TransformerEncoderLayer(width, 4, 384, dropout=0.1, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 12)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embed(tokens)).mean(1))


def build(batch: int = 6, seq: int = 40) -> Callable[[], None]:
    model = Classifier().train()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens, labels = torch.randint(1500, (batch, seq)), torch.randint(12, (batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
