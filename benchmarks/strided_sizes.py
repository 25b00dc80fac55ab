"""Programs in which much only follows a size: is another size scaled rightly from one capture, or refused?

    python benchmarks/strided_sizes.py [--each] [--only NAME]

Convolutions of sound, images and videos, pooling, upsampling, padding, patches, windows and frames leave of a size
another one. Each program is traced by shapes at two sizes and judged as ``equal_sizes`` does it. Rules were made on
these programs, so that they are not held out; two more, whose sizes coincide, are refused and not among them.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from equal_sizes import Case, Found, Step, judged
from torch import Tensor, nn
from torch.nn import functional as F

TOKENS = 4
"""Heads of a layer over tokens."""


def _step(parts: list[nn.Module], classes: int, batch: int, output: Callable[[], Tensor]) -> Step:
    """A training step of a classifier."""
    model = nn.ModuleList(parts)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        F.cross_entropy(output(), torch.randint(classes, (batch,))).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, TOKENS, 2 * width, 0.0, batch_first=True)


def wave(batch: int = 4, samples: int = 8000, width: int = 48) -> Step:
    net = nn.Sequential(nn.Conv1d(1, 32, 10, 5), nn.GELU(), nn.Conv1d(32, width, 3, 2), nn.GELU(),
                        nn.Conv1d(width, width, 2, 2), nn.GELU())
    layer, head = _layer(width), nn.Linear(width, 12)
    return _step([net, layer, head], 12, batch,
                 lambda: head(layer(net(torch.randn(batch, 1, samples)).transpose(1, 2)).mean(1)))


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(inner, outer, 3, stride, 1), nn.Conv2d(outer, outer, 3, 1, 1)
        self.one, self.two = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.short = nn.Conv2d(inner, outer, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.two(self.second(F.relu(self.one(self.first(x))))) + self.short(x))


def residuals(batch: int = 6, image: int = 40) -> Step:
    model = nn.Sequential(nn.Conv2d(3, 24, 7, 2, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), Residual(24, 24, 1),
                          Residual(24, 48, 2), Residual(48, 96, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                          nn.Linear(96, 10))
    return _step([model], 10, batch, lambda: model(torch.randn(batch, 3, image, image)))


def flattened(batch: int = 6, image: int = 28) -> Step:
    side = ((image - 4) // 2 - 4) // 2
    model = nn.Sequential(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 5), nn.ReLU(),
                          nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * side * side, 10))
    return _step([model], 10, batch, lambda: model(torch.randn(batch, 1, image, image)))


def hourglass(batch: int = 3, image: int = 48) -> Step:
    first, second, middle = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1), nn.Conv2d(32, 32, 3, 1, 1)
    up, out = nn.Conv2d(64, 16, 3, padding=1), nn.Conv2d(32, 5, 1)

    def output() -> Tensor:
        a = F.relu(first(torch.randn(batch, 3, image, image)))
        b = F.relu(second(F.max_pool2d(a, 2)))
        c = F.interpolate(F.relu(middle(F.avg_pool2d(b, 2))), scale_factor=2)
        d = F.interpolate(F.relu(up(torch.cat([b, c], 1))), scale_factor=2, mode="bilinear")
        found: Tensor = out(torch.cat([a, d], 1)).mean((2, 3))
        return found

    return _step([first, second, middle, up, out], 5, batch, output)


def patches(batch: int = 4, image: int = 48, width: int = 60, places: bool = False) -> Step:
    conv, layer, head = nn.Conv2d(3, width, 8, 8), _layer(width), nn.Linear(width, 9)
    table = nn.Embedding((image // 8)**2, width)

    def output() -> Tensor:
        x = conv(torch.randn(batch, 3, image, image)).flatten(2).transpose(1, 2)
        found: Tensor = head(layer(x + table.weight if places else x).mean(1))
        return found

    return _step([conv, layer, head, table], 9, batch, output)


def placed_patches(**sizes: int) -> Step:
    return patches(places=True, **sizes)


def causal(batch: int = 5, time: int = 96) -> Step:
    convolutions = nn.ModuleList(nn.Conv1d(20, 20, 3, dilation=2**at) for at in range(3))
    head = nn.Linear(20, 8)

    def output() -> Tensor:
        x = torch.randn(batch, 20, time)
        for at, one in enumerate(convolutions):
            x = x + F.relu(one(F.pad(x, (2 * 2**at, 0))))
        found: Tensor = head(x.mean(2))
        return found

    return _step([convolutions, head], 8, batch, output)


def windows(batch: int = 4, time: int = 200) -> Step:
    inner, head = nn.Linear(16, 64), nn.Linear(64, 3)
    return _step([inner, head], 3, batch,
                 lambda: head(F.relu(inner(torch.randn(batch, time).unfold(1, 16, 8))).mean(1)))


def frames(batch: int = 4, samples: int = 4000) -> Step:
    net, head = nn.Sequential(nn.Linear(129, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, 6)

    def output() -> Tensor:
        spectra = torch.stft(torch.randn(batch, samples), 256, 128, window=torch.hann_window(256), return_complex=True)
        found: Tensor = head(net(spectra.abs().mT).mean(1))
        return found

    return _step([net, head], 6, batch, output)


def video(batch: int = 2, moments: int = 8, image: int = 22) -> Step:
    model = nn.Sequential(nn.Conv3d(3, 12, 3, (1, 2, 2), 1), nn.ReLU(), nn.MaxPool3d(2), nn.Conv3d(12, 24, 3, 1, 1),
                          nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(24, 5))
    return _step([model], 5, batch, lambda: model(torch.randn(batch, 3, moments, image, image)))


CASES = (
    Case(wave, {"samples": 8000}, "samples", 16000), Case(wave, {"samples": 8000}, "samples", 5000),
    Case(wave, {"samples": 7777}, "samples", 20000), Case(wave, {"batch": 4}, "batch", 16),
    Case(residuals, {"image": 40}, "image", 80), Case(residuals, {"image": 40}, "image", 96),
    Case(residuals, {"batch": 6}, "batch", 24), Case(flattened, {"image": 28}, "image", 56),
    Case(flattened, {"batch": 6}, "batch", 24), Case(hourglass, {"image": 48}, "image", 96),
    Case(hourglass, {"image": 48}, "image", 24), Case(patches, {"image": 48}, "image", 96),
    Case(placed_patches, {"image": 48}, "image", 96), Case(causal, {"time": 96}, "time", 300),
    Case(windows, {"time": 200}, "time", 800), Case(frames, {"samples": 4000}, "samples", 12000),
    Case(video, {"moments": 8}, "moments", 16), Case(video, {"image": 22}, "image", 44),
)


def line(found: Found) -> str:
    """One case as a row."""
    return f"{found.verdict:8}{found.off:8.1%}  {found.case.label}  {found.why[:90]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--each", action="store_true", help="print what is most off")
    parser.add_argument("--only", default="")
    wanted = parser.parse_args()
    found = [judged(case) for case in CASES if wanted.only in case.label]
    for one in found:
        print(line(one))
        for text in one.worst if wanted.each else ():
            print(f"                  {text[:200]}")
    counts = {verdict: sum(one.verdict == verdict for one in found) for verdict in ("right", "refused", "quiet")}
    print(f"{len(found)} cases: " + ", ".join(f"{number} {verdict}" for verdict, number in counts.items()))


if __name__ == "__main__":
    main()
