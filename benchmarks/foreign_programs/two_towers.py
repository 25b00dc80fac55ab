"""Two towers of a recommender: a user's history against the batch's items and further ones drawn at random."""

from collections.abc import Callable

import torch
from torch import nn

ITEMS, HISTORY, FACTS, TEMPERATURE = 6000, 12, 22, 0.07


class Towers(nn.Module):
    def __init__(self, width: int = 72, hidden: int = 408) -> None:
        super().__init__()
        self.items = nn.Embedding(ITEMS, width)
        self.user = nn.Sequential(nn.Linear(width + FACTS, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.item = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))

    def forward(self, history: torch.Tensor, facts: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        users = self.user(torch.cat([self.items(history).mean(1), facts], 1))
        offered = self.item(self.items(items))
        return nn.functional.normalize(users, dim=1) @ nn.functional.normalize(offered, dim=1).T / TEMPERATURE


def build(batch: int = 96, candidates: int = 250) -> Callable[[], None]:
    model = Towers().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        history, facts = torch.randint(ITEMS, (batch, HISTORY)), torch.rand(batch, FACTS)
        bought, others = torch.randint(ITEMS, (batch,)), torch.randint(ITEMS, (candidates,))
        scores = model(history, facts, torch.cat([bought, others]))
        optimizer.zero_grad()
        nn.functional.cross_entropy(scores, torch.arange(batch)).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
