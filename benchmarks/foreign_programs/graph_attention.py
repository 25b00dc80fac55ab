"""Classify graphs by attention along their edges, which a matrix of each graph has."""

from collections.abc import Callable

import torch
from torch import nn

FEATURES, CLASSES = 19, 5


class Attention(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.values, self.source, self.target = nn.Linear(before, after), nn.Linear(after, 1), nn.Linear(after, 1)
        self.norm = nn.LayerNorm(after)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        values = self.values(x)
        scores = nn.functional.leaky_relu(self.source(values) + self.target(values).transpose(1, 2), 0.2)
        shares = scores.masked_fill(~edges, float("-inf")).softmax(-1)
        return nn.functional.elu(self.norm(torch.bmm(shares, values)))


class Network(nn.Module):
    def __init__(self, width: int = 96, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(width if number else FEATURES, width) for number in range(depth))
        self.head = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, CLASSES))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x.mean(1))


def build(batch: int = 14, nodes: int = 34) -> Callable[[], None]:
    model = Network().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=5e-4)

    def step() -> None:
        drawn = torch.rand(batch, nodes, nodes) < 0.1
        edges = drawn | drawn.transpose(1, 2) | torch.eye(nodes, dtype=torch.bool)
        features, labels = torch.randn(batch, nodes, FEATURES), torch.randint(CLASSES, (batch,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(features, edges), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
