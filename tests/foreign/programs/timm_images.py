"""Train a small timm vision model (random weights) with timm's own optimizer factory."""

import argparse

import timm
import timm.optim
import torch


def build(batch: int = 4, image: int = 64):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = timm.create_model("convnext_atto", pretrained=False, num_classes=10).to(device).train()
    optimizer = timm.optim.create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.05)
    criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

    def step() -> None:
        pixels = torch.randn(batch, 3, image, image).to(device)
        labels = torch.randint(10, (batch,)).to(device)
        optimizer.zero_grad()
        criterion(model(pixels), labels).backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.manual_seed(0)
    train = build(options.batch, options.image)
    for _ in range(options.steps):
        train()
