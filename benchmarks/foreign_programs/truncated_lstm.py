"""Truncated back-propagation through time: an LSTM goes over chunks of a text and keeps its state between them."""

from collections.abc import Callable

import torch
from torch import nn


def build(batch: int = 32, seq: int = 20) -> Callable[[], None]:
    embed, lstm, head = nn.Embedding(800, 96), nn.LSTM(96, 160, batch_first=True), nn.Linear(160, 800)
    parameters = [*embed.parameters(), *lstm.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(parameters)
    state = None

    def step() -> None:
        nonlocal state
        tokens = torch.randint(800, (batch, seq + 1))
        found, new = lstm(embed(tokens[:, :-1]), state)
        loss = nn.functional.cross_entropy(head(found).flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        state = tuple(one.detach() for one in new)

    return step


if __name__ == "__main__":
    from support import run

    run(build)
