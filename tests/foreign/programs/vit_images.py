"""Train a small vision transformer of Hugging Face transformers on random images."""

import argparse

import torch
from transformers import ViTConfig, ViTForImageClassification


def build(batch: int = 4, image: int = 64):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ViTForImageClassification(ViTConfig(
        hidden_size=192, num_hidden_layers=4, num_attention_heads=6, intermediate_size=768, image_size=image,
        patch_size=8, num_labels=10)).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)

    def step() -> None:
        pixels = torch.randn(batch, 3, image, image).to(device)
        labels = torch.randint(10, (batch,)).to(device)
        loss = model(pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
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
