"""Capture a training by Lightning: python examples/hooks/lightning_module.py runs/lightning"""

import argparse
import logging

import lightning
import torch

from foretrace.hooks import LightningCapture


class Autoencoder(lightning.LightningModule):
    """Two layers there and two back."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.GELU(), torch.nn.Linear(32, 64))

    def training_step(self, batch):
        (images,) = batch
        return torch.nn.functional.mse_loss(self.layers(images), images)

    def validation_step(self, batch):
        self.training_step(batch)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(out):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    images = torch.utils.data.TensorDataset(torch.rand(2048, 64))
    loader = torch.utils.data.DataLoader(images, batch_size=16)
    trainer = lightning.Trainer(
        max_steps=60, accumulate_grad_batches=2, accelerator="auto", devices=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
        callbacks=[LightningCapture(out, timed=6, stop=True)])
    trainer.fit(Autoencoder(), loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="directory of the capture")
    main(parser.parse_args().out)
