"""Sound from its frames: transposed convolutions, judged by spectra of two resolutions."""

from collections.abc import Callable

import torch
from torch import nn

MELS, HOP = 34, 64
RESOLUTIONS = ((256, 60), (128, 30))
"""Samples of a window, and from one to the next."""


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(width, width, 3, padding=gap, dilation=gap) for gap in (1, 3, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(nn.functional.leaky_relu(x, 0.1))
        return x


def generator() -> nn.Sequential:
    layers, before = [nn.Conv1d(MELS, 76, 7, padding=3)], 76
    for after in (44, 22, 11):
        layers += [nn.LeakyReLU(0.1), nn.ConvTranspose1d(before, after, 8, 4, 2), Residual(after)]
        before = after
    return nn.Sequential(*layers, nn.LeakyReLU(0.1), nn.Conv1d(before, 1, 7, padding=3), nn.Tanh(), nn.Flatten())


def spectra(sound: torch.Tensor, samples: int, hop: int) -> torch.Tensor:
    window = torch.hann_window(samples)
    return torch.stft(sound, samples, hop, window=window, return_complex=True).abs().clamp(min=1e-5)


def build(batch: int = 2, frames: int = 18) -> Callable[[], None]:
    model = generator().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4, betas=(0.8, 0.99))

    def step() -> None:
        mels, sound = torch.randn(batch, MELS, frames), torch.randn(batch, HOP * frames)
        made = model(mels)
        loss = nn.functional.l1_loss(made, sound)
        for resolution in RESOLUTIONS:
            found, wanted = spectra(made, *resolution), spectra(sound, *resolution)
            loss = loss + nn.functional.l1_loss(found.log(), wanted.log()) + nn.functional.l1_loss(found, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
