"""Hugging Face's GPT-Neo: every second layer attends to a window."""

from collections.abc import Callable

import torch
from transformers import GPTNeoConfig, GPTNeoForCausalLM


def build(batch: int = 5, seq: int = 36) -> Callable[[], None]:
    model = GPTNeoForCausalLM(GPTNeoConfig(
        vocab_size=700, hidden_size=136, num_layers=4, num_heads=4, attention_types=[[["global", "local"], 2]],
        max_position_embeddings=512, window_size=16, bos_token_id=0, eos_token_id=0)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        tokens = torch.randint(700, (batch, seq))
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
