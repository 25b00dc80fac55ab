"""Proximal policy optimisation on random worlds: every fourth update begins with a rollout."""

from collections.abc import Callable

import torch
from torch import nn

UPDATES = 4
HORIZON = 16
SIGHT, ACTIONS = 24, 6


class Policy(nn.Module):
    def __init__(self, width: int = 96) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(SIGHT, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.actor, self.critic = nn.Linear(width, ACTIONS), nn.Linear(width, 1)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(seen)
        return self.actor(hidden), self.critic(hidden).squeeze(-1)


def rollout(policy: Policy, world: torch.Tensor, envs: int) -> tuple[torch.Tensor, ...]:
    seen, kept = torch.randn(envs, SIGHT), []
    with torch.no_grad():
        for _ in range(HORIZON):
            logits, value = policy(seen)
            probabilities = logits.softmax(-1)
            action = torch.multinomial(probabilities, 1).squeeze(-1)
            reward = seen.tanh().mean(-1)
            kept.append((seen, action, probabilities.gather(1, action[:, None]).squeeze(1).log(), reward - value))
            seen = torch.tanh(seen @ world + 0.1 * torch.randn(envs, SIGHT))
    return tuple(torch.cat(parts) for parts in zip(*kept, strict=True))


def build(envs: int = 64) -> Callable[[], None]:
    policy, world = Policy(), torch.randn(SIGHT, SIGHT) / 5
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    state: dict[str, object] = {"updates": 0}

    def step() -> None:
        if state["updates"] % UPDATES == 0:
            state["batch"] = rollout(policy, world, envs)
        state["updates"] += 1
        seen, action, old, advantage = state["batch"]
        logits, value = policy(seen)
        ratio = (logits.log_softmax(-1).gather(1, action[:, None]).squeeze(1) - old).exp()
        clipped = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = -clipped.mean() + 0.5 * (value - advantage).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
