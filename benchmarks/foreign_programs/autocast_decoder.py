"""A decoder of two layers in bf16 by autocast, two micro-batches to an update."""

from collections.abc import Callable

import torch
from torch import nn

WIDTH = 112


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(700, WIDTH)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, 288, 0.0, batch_first=True, norm_first=True)
                                    for _ in range(2))
        self.head = nn.Linear(WIDTH, 700)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return self.head(x)


def build(batch: int = 3, seq: int = 40) -> Callable[[], None]:
    model = Decoder().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        for _ in range(2):
            tokens = torch.randint(700, (batch, seq + 1))
            with torch.autocast("cpu", torch.bfloat16):
                loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            (loss / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
