"""Hugging Face's BART learns to summarise."""

from collections.abc import Callable

import torch
from transformers import BartConfig, BartForConditionalGeneration


def build(batch: int = 3, seq: int = 52) -> Callable[[], None]:
    model = BartForConditionalGeneration(BartConfig(
        vocab_size=900, d_model=144, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=448, decoder_ffn_dim=448, max_position_embeddings=512)).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens, labels = torch.randint(4, 900, (batch, seq)), torch.randint(4, 900, (batch, seq))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
