import torch

from .registry import register_model


class Block(torch.nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = torch.nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.norm = torch.nn.BatchNorm2d(channels)
        self.pointwise = torch.nn.Conv2d(channels, channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.pointwise(torch.nn.functional.silu(self.norm(self.depthwise(x))))


@register_model
def small_net(channels=16, depth=2, classes=10):
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, channels, 3, stride=2, padding=1), *(Block(channels) for _ in range(depth)),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(channels, classes))
