"""An encoder whose gradients are summed over four small batches: each is an iteration, every fourth an update."""

from collections.abc import Callable

import torch
from torch import nn

ACCUMULATE = 4


class Encoder(nn.Module):
    def __init__(self, words: int = 2000, width: int = 128) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)
        self.head = nn.Linear(width, words)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(text)))


def build(batch: int = 3, seq: int = 20) -> Callable[[], None]:
    model = Encoder().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    state = {"iterations": 0}

    def step() -> None:
        text = torch.randint(2000, (batch, seq))
        loss = nn.functional.cross_entropy(model(text).flatten(0, 1), text.flatten())
        (loss / ACCUMULATE).backward()
        state["iterations"] += 1
        if state["iterations"] % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
