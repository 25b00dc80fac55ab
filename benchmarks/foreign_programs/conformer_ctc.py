"""Conformer blocks over frames of sound, with the CTC loss of the text."""

from collections.abc import Callable

import torch
from torch import nn

MELS, LETTERS, SPOKEN = 20, 30, 9


class Convolution(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(width), nn.Conv1d(width, 2 * width, 1)
        self.depth = nn.Conv1d(width, width, 15, padding=7, groups=width)
        self.batch_norm, self.last = nn.BatchNorm1d(width), nn.Conv1d(width, width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.glu(self.first(self.norm(x).transpose(1, 2)), 1)
        return self.last(nn.functional.silu(self.batch_norm(self.depth(x)))).transpose(1, 2)


class Conformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.halves = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.SiLU(),
                                                  nn.Dropout(0.1), nn.Linear(3 * width, width)) for _ in range(2))
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 4, batch_first=True)
        self.convolution, self.last = Convolution(width), nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + 0.5 * self.halves[0](x)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.convolution(x)
        return self.last(x + 0.5 * self.halves[1](x))


def build(batch: int = 3, frames: int = 100, width: int = 88) -> Callable[[], None]:
    model = nn.ModuleDict({"first": nn.Conv1d(MELS, width, 3, 2, 1), "head": nn.Linear(width, LETTERS),
                           "blocks": nn.Sequential(*(Conformer(width) for _ in range(2)))}).train()
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-3)
    loss_of = nn.CTCLoss(zero_infinity=True)

    def step() -> None:
        sound, text = torch.randn(batch, MELS, frames), torch.randint(1, LETTERS, (batch, SPOKEN))
        x = model["head"](model["blocks"](model["first"](sound).relu().transpose(1, 2))).log_softmax(-1)
        lengths = torch.full((batch,), x.shape[1]), torch.full((batch,), SPOKEN)
        optimizer.zero_grad()
        loss_of(x.transpose(0, 1), text, *lengths).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
