"""A tagger of a bidirectional GRU over embedded words."""

from collections.abc import Callable

import torch
from torch import nn


class Tagger(nn.Module):
    def __init__(self, width: int = 80) -> None:
        super().__init__()
        self.embed = nn.Embedding(900, width)
        self.gru = nn.GRU(width, width, bidirectional=True, batch_first=True)
        self.head = nn.Linear(2 * width, 24)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(self.embed(words))[0])


def build(batch: int = 6, seq: int = 28) -> Callable[[], None]:
    model = Tagger().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        words, tags = torch.randint(900, (batch, seq)), torch.randint(24, (batch, seq))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(words).flatten(0, 1), tags.flatten()).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
