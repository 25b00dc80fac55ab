"""Hugging Face's ELECTRA tags tokens."""

from collections.abc import Callable

import torch
from transformers import ElectraConfig, ElectraForTokenClassification


def build(batch: int = 4, seq: int = 44) -> Callable[[], None]:
    model = ElectraForTokenClassification(ElectraConfig(
        vocab_size=800, embedding_size=96, hidden_size=160, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=480, num_labels=9)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        tokens, labels = torch.randint(800, (batch, seq)), torch.randint(9, (batch, seq))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
