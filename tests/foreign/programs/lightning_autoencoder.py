"""Train a convolutional autoencoder with Lightning's Trainer."""

import argparse
import logging
import warnings

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(),
            nn.Linear(32 * 8 * 8, 64))
        self.decoder = nn.Sequential(
            nn.Linear(64, 32 * 8 * 8), nn.Unflatten(1, (32, 8, 8)), nn.ReLU(),
            nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(16, 3, 2, stride=2))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.encoder(images))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self(batch[0]), batch[0])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


def build(batch: int = 16):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Autoencoder().to(device).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def step() -> None:
        images = torch.randn(batch, 3, 32, 32).to(device)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(images), images).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    lightning.seed_everything(0, verbose=False)
    warnings.filterwarnings("ignore", module="lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    images = torch.randn(options.batch * options.steps, 3, 32, 32)
    loader = DataLoader(TensorDataset(images), batch_size=options.batch, shuffle=True)
    trainer = lightning.Trainer(
        max_steps=options.steps, accelerator="auto", devices=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Autoencoder(), loader)


if __name__ == "__main__":
    main()
