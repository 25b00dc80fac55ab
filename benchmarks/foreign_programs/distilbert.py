"""Fill in masked tokens with a small DistilBERT of Hugging Face transformers."""

from collections.abc import Callable

import torch
from transformers import DistilBertConfig, DistilBertForMaskedLM


def build(batch: int = 4, seq: int = 48) -> Callable[[], None]:
    model = DistilBertForMaskedLM(DistilBertConfig(
        vocab_size=2500, dim=192, n_layers=3, n_heads=6, hidden_dim=768, max_position_embeddings=512)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens = torch.randint(5, 2500, (batch, seq))
        labels = torch.where(torch.rand(batch, seq) < 0.15, tokens, -100)
        loss = model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
