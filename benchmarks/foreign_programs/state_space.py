"""A language model of gated linear recurrences, which a loop goes along the text with."""

from collections.abc import Callable

import torch
from torch import nn

WORDS = 420


class Recurrence(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.into, self.out = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(width, width)
        self.decay = nn.Parameter(torch.linspace(1.0, 4.0, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values, keep, add, gate = self.into(self.norm(x)).chunk(4, -1)
        keep = torch.exp(-nn.functional.softplus(self.decay) * torch.sigmoid(keep))
        values = values * torch.sigmoid(add) * torch.sqrt(1 - keep**2 + 1e-6)
        state, states = torch.zeros_like(x[:, 0]), []
        for position in range(x.shape[1]):
            state = keep[:, position] * state + values[:, position]
            states.append(state)
        return x + self.out(torch.stack(states, 1) * nn.functional.silu(gate))


class Language(nn.Module):
    def __init__(self, width: int = 148, depth: int = 3) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, width), nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Recurrence(width) for _ in range(depth)))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.layers(self.embed(tokens))))


def build(batch: int = 5, seq: int = 26) -> Callable[[], None]:
    model = Language().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> None:
        text = torch.randint(WORDS, (batch, seq + 1))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
