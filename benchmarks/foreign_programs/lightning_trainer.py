"""Lightning's Trainer trains a perceptron with batch norm, one turn of its own loop a step."""

from collections.abc import Callable, Iterator

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Rows(IterableDataset):
    def __init__(self, batch: int) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            yield torch.randn(self.batch, 32), torch.randint(5, (self.batch,))


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(4) for layer in (
            nn.LazyLinear(64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1))), nn.LazyLinear(5))
        self.layers(torch.randn(2, 32))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], index: int) -> torch.Tensor:
        loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class _Kept(lightning.Callback):
    """Keeps what the loop fetches from while it runs."""

    def on_train_batch_end(self, trainer: lightning.Trainer, *_: object) -> None:
        self.fetcher = trainer.fit_loop._data_fetcher


def build(batch: int = 16) -> Callable[[], None]:
    kept = _Kept()
    trainer = lightning.Trainer(max_steps=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                                enable_progress_bar=False, enable_model_summary=False, callbacks=[kept])
    trainer.fit(Classifier(), DataLoader(Rows(batch), batch_size=None))
    loop, fetcher = trainer.fit_loop.epoch_loop, kept.fetcher
    fetcher.setup(trainer.fit_loop._combined_loader)
    iter(fetcher)
    trainer.training = True

    def step() -> None:
        loop.advance(fetcher)
        loop.on_advance_end(fetcher)

    return step


if __name__ == "__main__":
    from support import run

    run(build)
