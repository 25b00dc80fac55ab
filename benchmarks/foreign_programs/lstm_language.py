"""A language model of two LSTM layers with tied sizes."""

from collections.abc import Callable

import torch
from torch import nn


class Language(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(1200, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.2)
        self.head = nn.Linear(width, 1200)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def build(batch: int = 6, seq: int = 24) -> Callable[[], None]:
    model = Language().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        tokens = torch.randint(1200, (seq + 1, batch))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
