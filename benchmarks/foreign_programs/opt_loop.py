"""Train a small OPT of Hugging Face transformers in a plain loop."""

from collections.abc import Callable

import torch
from transformers import OPTConfig, OPTForCausalLM


def build(batch: int = 3, seq: int = 56) -> Callable[[], None]:
    model = OPTForCausalLM(OPTConfig(
        vocab_size=2500, hidden_size=128, num_hidden_layers=4, ffn_dim=512, num_attention_heads=4,
        max_position_embeddings=512, word_embed_proj_dim=128)).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)

    def step() -> None:
        tokens = torch.randint(5, 2500, (batch, seq))
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()

    return step


if __name__ == "__main__":
    from support import run

    run(build)
